-- The starts of evaluations with --fresh: of all streams, or of one.
SELECT stream, unix_micros(logged_at) AS at_us, arrival
FROM rule_log
WHERE action = 'begun_afresh' AND (:stream IS NULL OR stream = :stream)
ORDER BY logged_at
