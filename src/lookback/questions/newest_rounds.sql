-- The last 200 rounds of a stream's ingest that ended at :since or later, the newest first.
SELECT
  offered, ingested, duplicates, rejected, commits, unix_micros(ended_at) AS ended_us,
  unix_micros(first_ingested_at) AS first_us
FROM ingests
WHERE stream = :stream AND ended_at >= :since
ORDER BY ended_at DESC
LIMIT 200
