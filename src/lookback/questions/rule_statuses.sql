-- The versions of all rules, without those that the stream rejected. To read few documents, only the last version of a
-- rule with the same status (and if quarantined, the same evidence) comes with its document.
SELECT
  rule_id, version, status, evidence,
  CASE
    WHEN row_number() OVER (PARTITION BY rule_id, status, evidence ORDER BY coalesce(version, 0) DESC) = 1 THEN document
  END AS document
FROM (
  SELECT
    r.rule_id, r.version, r.status, r.document, CASE WHEN r.status = 'quarantined' THEN r.evidence END AS evidence
  FROM rules r
  LEFT ANTI JOIN rejected_versions j ON j.rule_id = r.rule_id AND j.version = r.version
  WHERE r.rule_id <> '*'
) AS listed
ORDER BY rule_id, version
