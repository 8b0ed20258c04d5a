-- Adds new values to a list, and changes those that are there, by the rows of list_outcomes.
MERGE INTO lists AS t
USING (SELECT * FROM judged WHERE outcome IN ('new', 'changed')) AS s
ON t.list = :list AND t.value = s.value
WHEN MATCHED THEN UPDATE SET
  expires_at = s.expires_at, reason = coalesce(s.reason, t.reason), kind = coalesce(s.kind, t.kind),
  author = :author, added_at = :now
WHEN NOT MATCHED THEN INSERT (list, value, expires_at, reason, kind, author, added_at)
  VALUES (:list, s.value, s.expires_at, s.reason, s.kind, :author, :now)
