-- The newest 200 rows of alerts decided at :since or later with the same :key, or with one of the :entities. Both are JSON;
-- NULL: none.
SELECT alert_id, revision, verdict, mode, severity, rule_id, event_time, message, decided_at
FROM alerts
WHERE decided_at >= :since AND (
  -- Spark cannot compare maps.
  to_json(array_sort(map_entries(key))) = to_json(array_sort(map_entries(from_json(:key, 'MAP<STRING, STRING>'))))
  OR array_size(filter(
    map_entries(from_json(:entities, 'MAP<STRING, STRING>')), e -> coalesce(entities[e.key] = e.value, false)
  )) > 0
)
ORDER BY decided_at DESC, revision DESC
LIMIT 200
