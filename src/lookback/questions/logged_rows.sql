-- What a stream's evaluation wrote to rule_log after :begun_at and up to :ended_at, in the order in which it took effect.
SELECT stream, rule_id, version, action, arrival, rules_commit, decision, logged_at
FROM rule_log
WHERE stream = :stream
  AND (:begun_at IS NULL OR logged_at > :begun_at) AND (:ended_at IS NULL OR logged_at <= :ended_at)
ORDER BY arrival NULLS FIRST, rules_commit NULLS FIRST, logged_at NULLS FIRST, position NULLS FIRST
