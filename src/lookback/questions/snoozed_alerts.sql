-- The number of alerts that the active snoozes keep out of the queue, by the rule and key of the snooze. An alert counts
-- for each snooze that covers it.
WITH covered AS (
  SELECT alert_id, explode(snoozed_by) AS snooze FROM open_alerts WHERE queue
)
SELECT snooze.rule_id AS rule_id, snooze.key_text AS key_text, count(DISTINCT alert_id) AS alerts
FROM covered
GROUP BY snooze.rule_id, snooze.key_text
