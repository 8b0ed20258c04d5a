-- The rows of an alert, by evaluation and revision.
SELECT * EXCEPT (begun_at, evaluation)
FROM numbered_alerts
WHERE alert_id = :alert_id
ORDER BY evaluation, revision, decided_at
