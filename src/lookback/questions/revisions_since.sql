-- The revisions of the alerts with these :ids decided at :since or later, in order of time, which is in microseconds.
SELECT alert_id, unix_micros(decided_at) AS time, revision
FROM alerts
WHERE decided_at >= :since AND alert_id IN (SELECT explode(:ids))
ORDER BY time, revision
