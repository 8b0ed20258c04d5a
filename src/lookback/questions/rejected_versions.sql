-- The versions of rules that a stream rejected and no stream applied. They are not in force.
SELECT rule_id, version
FROM rule_log
WHERE rule_id IS NOT NULL AND version IS NOT NULL
  AND action IN ('rejected', 'drafted', 'shadowed', 'activated', 'paused', 'retired', 'quarantined')
  AND (:stream IS NULL OR stream = :stream)
  AND (:rule_id IS NULL OR rule_id = :rule_id)
GROUP BY rule_id, version
HAVING bool_and(action = 'rejected')
