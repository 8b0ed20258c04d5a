-- The numbers of a stream's events by outcome (action), from the commit :since on, of those ingested at :stamped or later.
-- :judged is the last judged commit. With unknown = true: rows of late_events about an event that was not judged, and
-- second rows about the same event. An action of NULL: the row is not about an event.
WITH ingested AS (
  SELECT event_id, arrival, arrival > :judged AS waiting FROM events
  WHERE _change_type = 'insert' AND (:stamped IS NULL OR stamp >= :stamped)
),
reported AS (
  SELECT event_id, arrival, min(action) AS action, count(*) AS reports
  FROM late_events
  WHERE stream = :stream AND arrival >= :since
  GROUP BY event_id, arrival
)
SELECT action, unknown, count(*) AS counted
FROM (
  SELECT
    CASE WHEN e.waiting IS NULL THEN NULL WHEN e.waiting THEN 'waiting' ELSE coalesce(l.action, 'evaluated') END AS action,
    l.reports IS NOT NULL AND (e.waiting IS NULL OR e.waiting OR l.reports > 1) AS unknown
  FROM ingested e FULL JOIN reported l ON l.event_id = e.event_id AND l.arrival = e.arrival
) AS outcomes
GROUP BY action, unknown
