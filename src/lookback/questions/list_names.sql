-- The names of the lists. A list without values does not exist.
SELECT DISTINCT list FROM lists WHERE list IS NOT NULL ORDER BY list
