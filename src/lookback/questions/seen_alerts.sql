-- What reviewers saw: for the last review of each alert as of :as_of, the row of the alert at that time, if it has an event.
SELECT alert_id, stream, disposition, reviewed_at, seen.event_id, seen.evidence, seen.revision, seen.evaluation
FROM (
  SELECT
    n.alert_id, n.stream, r.disposition, r.reviewed_at,
    max_by(
      struct(n.event_id, n.evidence, n.revision, n.evaluation),
      struct(
        -- An evaluation that began after the review may have written the alert differently from what the reviewer saw.
        n.evaluation <= coalesce(array_size(filter(n.begun_at, t -> t < r.reviewed_at)), 0),
        n.evaluation, n.revision
      )
    ) AS seen
  FROM numbered_alerts n JOIN last_reviews r ON r.alert_id = n.alert_id
  -- A review written outside Lookback may lack the revision; it then means the last one at its time.
  WHERE n.event_id IS NOT NULL AND (:stream IS NULL OR n.stream = :stream)
    AND n.revision <= coalesce(r.revision, 2147483647)
    AND (r.revision IS NOT NULL OR n.decided_at <= r.reviewed_at)
  GROUP BY n.alert_id, n.stream, r.disposition, r.reviewed_at
) AS by_alert
