-- The columns of a ListChange from the change feed of lists, for all lists or those in :names. An update is a delete and
-- an insert. Rows without a list or value are left out.
SELECT
  CASE WHEN _change_type IN ('update_preimage', 'delete') THEN 'delete' ELSE 'insert' END AS change,
  _commit_version AS commit, make_valid_utf8(list) AS list, make_valid_utf8(value) AS value,
  unix_micros(expires_at) AS expires_at, kind
FROM changes
WHERE list IS NOT NULL AND value IS NOT NULL AND (:names IS NULL OR array_contains(CAST(:names AS ARRAY<STRING>), list))
