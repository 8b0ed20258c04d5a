-- The rows of a list, each with its state by the clock.
SELECT *, CASE WHEN expires_at <= current_timestamp() THEN 'expired' ELSE 'active' END AS state
FROM lists
WHERE list = :list
ORDER BY value, added_at
