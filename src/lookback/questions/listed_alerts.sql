-- All rows of alerts in order of arrival.
SELECT * FROM alerts
WHERE (:rule_id IS NULL OR rule_id = :rule_id) AND (:stream IS NULL OR stream = :stream)
  AND (:tag IS NULL OR array_contains(transform(tags, t -> lower(t)), lower(:tag)))
ORDER BY arrival, event_time, event_id, rule_id, alert_id, revision, decided_at
