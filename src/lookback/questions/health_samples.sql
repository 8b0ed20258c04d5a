-- The rows of metrics of a stream's evaluation since :since, oldest first; its last row, if there are none. Rows of
-- before the last start with --fresh are of another evaluation, and so not recent.
SELECT
  unix_micros(measured_at) AS at_us,
  measured_at >= greatest(
    :since,
    coalesce((SELECT max(logged_at) FROM rule_log WHERE stream = :stream AND action = 'begun_afresh'), :since)
  ) AS is_recent,
  events, late, discarded, lag_seconds,
  unix_micros(watermark) AS watermark_us, state_rows, run_ms, evaluate_ms, write_ms, to_json(by_rule) AS by_rule, judged
FROM metrics
WHERE stream = :stream
  AND (measured_at >= :since OR measured_at = (SELECT max(measured_at) FROM metrics WHERE stream = :stream))
ORDER BY measured_at
