-- The time of the first event at :last or before, in microseconds since 1970; NULL if there is none. Delta skips the files
-- of later events.
SELECT min(unix_micros(event_time)) AS first FROM events WHERE event_time <= :last
