-- The last commit that was judged before a version came into shadow in one evaluation: -1 for none, NULL if it never did.
SELECT max(coalesce(arrival, -1)) AS arrival
FROM rule_log
WHERE stream = :stream AND rule_id = :rule_id AND version = :shadow AND action = 'shadowed'
  AND (:begun_at IS NULL OR logged_at > :begun_at) AND (:ended_at IS NULL OR logged_at <= :ended_at)
