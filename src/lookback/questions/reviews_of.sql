-- The reviews of the alerts with these :ids, in order of time, which is in microseconds.
SELECT
  alert_id, disposition, revision, coalesce(reviewer, '') AS reviewer, coalesce(note, '') AS note,
  unix_micros(reviewed_at) AS time
FROM reviews
WHERE alert_id IN (SELECT explode(:ids))
ORDER BY time, reviewer
