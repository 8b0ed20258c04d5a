-- One row if an alert, open or not, was decided before :until; else none.
SELECT decided_at FROM alerts WHERE decided_at < :until LIMIT 1
