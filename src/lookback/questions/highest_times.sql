-- The highest event time of each commit up to :arrival, and of each member of a union, in microseconds, without events
-- more than `most` ahead of it.
SELECT _commit_version, member, max(at_us) AS at_us
FROM events
WHERE _change_type = 'insert' AND _commit_version <= :arrival AND at_us - most <= committed
GROUP BY _commit_version, member
