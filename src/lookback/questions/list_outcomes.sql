-- What values that are offered to a list do there: outcome is new, changed, duplicate or rejected. If several have the
-- same value, the last to expire counts; NULL never expires.
SELECT
  o.*,
  CASE
    WHEN o.problem IS NOT NULL THEN 'rejected'
    WHEN o.nth > 1 THEN 'duplicate'
    WHEN known.value IS NULL THEN 'new'
    WHEN known.expiries = array(coalesce(unix_micros(o.expires_at), 9223372036854775807))
      AND (o.kind IS NULL OR known.kinds = array(o.kind))
      AND (o.reason IS NULL OR known.reasons = array(o.reason)) THEN 'duplicate'
    ELSE 'changed'
  END AS outcome
FROM (
  SELECT
    *,
    row_number() OVER (PARTITION BY problem IS NULL, value ORDER BY expires_at DESC NULLS FIRST, position) AS nth
  FROM offered
) AS o
LEFT JOIN (
  SELECT
    value, collect_set(coalesce(unix_micros(expires_at), 9223372036854775807)) AS expiries,
    collect_set(coalesce(kind, '')) AS kinds, collect_set(coalesce(reason, '')) AS reasons
  FROM lists
  WHERE list = :list
  GROUP BY value
) AS known
ON known.value = o.value
