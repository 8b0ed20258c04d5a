-- The newest failure of each rule of a stream, and the newest other row of rule_log.
SELECT rule_id, has_failed, at_us, newest.action AS action, newest.message AS message
FROM (
  SELECT
    rule_id, action = 'failed' AS has_failed, unix_micros(max(logged_at)) AS at_us,
    max_by(struct(action, message), struct(logged_at, position)) AS newest
  FROM rule_log
  WHERE stream = :stream AND rule_id IS NOT NULL
  GROUP BY rule_id, action = 'failed'
) AS by_rule
ORDER BY rule_id
