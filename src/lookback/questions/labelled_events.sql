-- The labels of events as known at :as_of, one row per labelled event. A row of labels wins over a review; of several rows
-- the last, and of those of one time a positive one.
WITH known AS (
  SELECT
    stream, explode(array_union(array(event_id), coalesce(evidence, array()))) AS event_id,
    disposition = 'confirmed' AS positive, disposition AS label, reviewed_at AS labelled_at, 'review' AS source, 0 AS rank
  FROM seen_alerts
  WHERE disposition IN ('confirmed', 'false_positive', 'benign')
  UNION ALL
  SELECT stream, event_id, positive, label, labelled_at, source, 1 AS rank
  FROM labels
  WHERE labelled_at <= :as_of AND (:stream IS NULL OR stream = :stream)
)
SELECT stream, event_id, last.positive, last.label, last.labelled_at, last.source
FROM (
  -- Structs compare field by field, with NULL first.
  SELECT stream, event_id, max(struct(rank, labelled_at, positive, label, source)) AS last
  FROM known
  GROUP BY stream, event_id
) AS by_event
