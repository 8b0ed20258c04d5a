-- All snoozes that ended after :ended_after, in the order of their ends.
SELECT
  rule_id, key, `from`, until, reason, author, unix_micros(`from`) AS from_us, unix_micros(until) AS until_us,
  -- The key as a text with sorted fields, since Spark cannot compare maps.
  to_json(array_sort(map_entries(key))) AS key_text
FROM snoozes
WHERE :ended_after IS NULL OR until > :ended_after
ORDER BY until, rule_id, `from`
