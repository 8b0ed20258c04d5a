-- The numbers of alerts by disposition. An alert counts once, by its last review as of :as_of.
SELECT a.stream, a.rule_id, r.disposition, count(*) AS alerts
FROM last_reviews r JOIN (SELECT DISTINCT alert_id, stream, rule_id FROM alerts) AS a ON a.alert_id = r.alert_id
GROUP BY a.stream, a.rule_id, r.disposition
ORDER BY a.stream, a.rule_id, r.disposition
