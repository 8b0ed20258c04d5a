-- The versions of rules that wait for the history of their windows, and since when. Includes versions that a later one
-- has replaced.
SELECT rule_id, version, min(CASE WHEN action = 'warming' THEN logged_at END) AS since
FROM rule_log
WHERE rule_id IS NOT NULL AND version IS NOT NULL AND (:stream IS NULL OR stream = :stream)
GROUP BY rule_id, version
HAVING bool_or(action = 'warming')
  AND NOT bool_or(action IN ('shadowed', 'activated', 'paused', 'retired', 'quarantined'))
