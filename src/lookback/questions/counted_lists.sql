-- All lists, with the numbers of their values and of those that have expired by the clock.
SELECT
  list, max(kind) AS kind, count(*) AS values, count(CASE WHEN is_expired THEN 1 END) AS expired,
  max(added_at) AS last_added_at
FROM (
  SELECT
    list, value, max(kind) AS kind, max(added_at) AS added_at,
    bool_and(coalesce(expires_at <= current_timestamp(), false)) AS is_expired
  FROM lists
  GROUP BY list, value
) AS by_value
GROUP BY list
ORDER BY list
