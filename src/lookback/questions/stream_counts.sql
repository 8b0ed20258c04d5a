-- The numbers of a stream's alerts, open alerts and rejected rows since :since, and of all its late events.
SELECT
  (SELECT count(*) FROM alerts WHERE stream = :stream AND decided_at >= :since) AS alerts,
  (SELECT count(*) FROM open_queue) AS `open`,
  (SELECT count(*) FROM late_events WHERE stream = :stream) AS late,
  (SELECT count(*) FROM rejected_events WHERE stream = :stream AND ingested_at >= :since) AS rejected
