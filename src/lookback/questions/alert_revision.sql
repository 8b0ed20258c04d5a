-- The row of an alert's revision. With :decided_at, Delta skips the files of other alerts.
SELECT * FROM alerts
WHERE decided_at = :decided_at AND alert_id = :alert_id AND revision = :revision
LIMIT 1
