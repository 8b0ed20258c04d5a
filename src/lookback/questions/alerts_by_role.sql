-- The number of a stream's alerts raised since :since, by rule and mode.
SELECT rule_id, mode, count(DISTINCT alert_id) AS alerts
FROM alerts
WHERE stream = :stream AND decided_at >= :since AND verdict = 'raised'
GROUP BY rule_id, mode
