-- The rows of alerts, each with the number of the evaluation that wrote it, and the times at which its stream was evaluated
-- with --fresh. Such an evaluation numbers the revisions from 0 again.
SELECT a.*, b.begun_at, coalesce(array_size(filter(b.begun_at, t -> t < a.decided_at)), 0) AS evaluation
FROM alerts a LEFT JOIN (
  SELECT stream, array_agg(logged_at) AS begun_at FROM rule_log WHERE action = 'begun_afresh' GROUP BY stream
) AS b ON b.stream = a.stream
