-- The standing alerts of a rule's active version and of the one in shadow after the commit :after in one evaluation, one row
-- for the same key and event or window.
WITH last AS (
  SELECT alert_id, mode, max_by(struct(verdict, event_id, event_time, window_start, key), revision) AS alert
  FROM alerts
  WHERE stream = :stream AND rule_id = :rule_id AND (mode = 'active' OR rule_version = :shadow) AND arrival > :after
    AND (:begun_at IS NULL OR decided_at > :begun_at) AND (:ended_at IS NULL OR decided_at <= :ended_at)
  GROUP BY alert_id, mode
),
matched AS (
  SELECT
    any_value(alert.key) AS key, alert.event_id AS event_id, min(alert.event_time) AS event_time,
    min(alert.window_start) AS window_start,
    max(CASE WHEN mode = 'active' THEN alert_id END) AS active_alert_id,
    max(CASE WHEN mode = 'shadow' THEN alert_id END) AS shadow_alert_id
  FROM last
  WHERE alert.verdict = 'raised'
  GROUP BY
    to_json(array_sort(map_entries(alert.key))), alert.event_id,
    -- An alert on an event is the same in any window, so windows only distinguish alerts without an event.
    CASE WHEN alert.event_id IS NULL THEN alert.window_start END
)
SELECT
  CASE
    WHEN shadow_alert_id IS NULL THEN 'only active' WHEN active_alert_id IS NULL THEN 'only shadow' ELSE 'both'
  END AS side,
  key, event_id, event_time, window_start, active_alert_id, shadow_alert_id
FROM matched
