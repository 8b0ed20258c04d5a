-- The versions of rules that a gate refused and that the stream has not activated since. :refusal is the gate's decision.
SELECT rule_id, version
FROM rule_log
WHERE action = 'activated' OR (action = 'rejected' AND decision = :refusal)
GROUP BY rule_id, version
HAVING max_by(action, struct(logged_at, position)) = 'rejected'
