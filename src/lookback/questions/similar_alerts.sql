-- The newest 200 rows of alerts decided at :since or later with the same :key (JSON), or with the same entity.
SELECT alert_id, revision, verdict, mode, severity, rule_id, event_time, message, decided_at
FROM alerts
WHERE decided_at >= :since AND (
  -- Spark cannot compare maps.
  to_json(array_sort(map_entries(key))) = to_json(array_sort(map_entries(from_json(:key, 'MAP<STRING, STRING>'))))
  OR (entity = :entity AND entity_id = :entity_id)
)
ORDER BY decided_at DESC, revision DESC
LIMIT 200
