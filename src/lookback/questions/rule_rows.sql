-- All rows of rules, with commands, or those of one rule.
SELECT rule_id, version, status, document, author, comment, changed_at, approved_by, evidence
FROM rules
WHERE :rule_id IS NULL OR rule_id = :rule_id
