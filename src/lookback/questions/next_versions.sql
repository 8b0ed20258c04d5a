-- The offered rows of rules, if each rule still has as many rows, and the same highest version, as when it was read.
-- Fails otherwise.
SELECT
  o.rule_id,
  CASE
    WHEN coalesce(known.rows, 0) = o.rows AND coalesce(known.highest, 0) = o.highest THEN o.version
    ELSE CAST(raise_error(:conflict) AS BIGINT)
  END AS version,
  o.* EXCEPT (rule_id, version, rows, highest)
FROM offered AS o
LEFT JOIN (
  SELECT rule_id, count(*) AS rows, max(version) AS highest
  FROM rules
  WHERE rule_id IN (SELECT rule_id FROM offered)
  GROUP BY rule_id
) AS known
ON known.rule_id = o.rule_id
