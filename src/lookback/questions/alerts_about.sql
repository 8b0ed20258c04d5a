-- The alerts of a rule, in one evaluation, about an event: raised by it (:of_event), with it as evidence (:of_evidence),
-- or else about a window that covers its time.
SELECT alert_id, revision, verdict, rule_version, mode, message, arrival, key
FROM alerts
WHERE stream = :stream AND rule_id = :rule_id
  AND (:begun_at IS NULL OR decided_at > :begun_at) AND (:ended_at IS NULL OR decided_at <= :ended_at)
  AND CASE
    WHEN :of_event THEN event_id = :event_id OR (:of_evidence AND array_contains(evidence, :event_id))
    ELSE window_start <= :time AND window_end > :time
  END
