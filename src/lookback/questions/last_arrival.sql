-- The last commit of a stream's events for which an alert was written.
SELECT max(arrival) AS arrival FROM alerts WHERE stream = :stream
