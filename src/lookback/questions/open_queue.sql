-- The open alerts in the order in which a person reviews them: the most severe first, then the highest score, then the
-- newest event. Leaves out snoozed alerts unless :with_snoozed. With :reports it lists only reports: alerts of a rule
-- with `queue: false`, or of severity info.
SELECT
  severity, event_time, rule_id, rule_version, stream, key, message, measures, alert_id, revision, event_id, window_start,
  window_end, window_complete, arrival, decided_at, entities, score, tags
FROM open_alerts
WHERE queue <> :reports
  AND (:with_snoozed OR coalesce(array_size(snoozed_by), 0) = 0)
  AND (:rule_id IS NULL OR rule_id = :rule_id)
  AND (:stream IS NULL OR stream = :stream)
  AND (:tag IS NULL OR array_contains(transform(tags, t -> lower(t)), lower(:tag)))
ORDER BY
  array_position(array('info', 'low', 'medium', 'high', 'critical'), severity) DESC, coalesce(score, 0) DESC,
  event_time DESC, rule_id, alert_id
