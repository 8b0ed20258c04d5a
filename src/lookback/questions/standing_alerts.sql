-- The alerts in mode active whose last revision, as of :as_of, is raised, each with the time of its first decision. The last
-- revision is that of the last evaluation that wrote the alert. is_named: the row names all events behind the alert; rows
-- about windows, and about sequences of 100 events or more, do not.
SELECT
  alert.*, first_decided_at,
  alert.event_id IS NOT NULL AND coalesce(array_size(alert.evidence), 0) < 100 AS is_named
FROM (
  SELECT
    max_by(struct(*), struct(evaluation, revision)) AS alert, min(decided_at) AS first_decided_at
  FROM numbered_alerts
  WHERE mode = 'active' AND decided_at <= :as_of AND (:stream IS NULL OR stream = :stream)
  GROUP BY alert_id
) AS by_alert
WHERE alert.verdict = 'raised'
