-- An event at :start or before; no row if there is none. Delta skips the files of later events.
SELECT event_time FROM events WHERE event_time <= :start LIMIT 1
