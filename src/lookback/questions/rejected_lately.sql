-- The number of rows that ingest rejected since :since, and the reason of the newest.
SELECT count(*) AS counted, max_by(reason, ingested_at) AS reason
FROM rejected_events
WHERE stream = :stream AND ingested_at >= :since
