-- The last review of each alert as of :as_of.
SELECT alert_id, review.reviewed_at, review.disposition, review.revision
FROM (
  SELECT alert_id, max(struct(reviewed_at, reviewer, disposition, revision)) AS review
  FROM reviews
  WHERE reviewed_at <= :as_of
  GROUP BY alert_id
) AS by_alert
