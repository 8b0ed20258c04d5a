-- The open alerts: the last revision is raised, not in shadow and not reviewed. Includes reports (queue = false), and
-- alerts that active snoozes cover (snoozed_by). An alert counts if it was decided at :since or later, and before :until.
WITH numbered AS (
  SELECT * FROM numbered_alerts WHERE decided_at >= :since
),
later AS (
  -- Revisions are few and narrow. Sorting all wide rows would take longer.
  SELECT alert_id, evaluation, revision FROM numbered WHERE revision > 0 OR evaluation > 0
),
active AS (
  SELECT array_agg(struct(rule_id, key, key_text)) AS snoozes FROM listed_snoozes
  WHERE `from` <= current_timestamp() AND until > current_timestamp()
)
SELECT
  a.severity, a.event_time, a.rule_id, a.rule_version, a.stream, a.key, a.message, a.measures, a.alert_id, a.revision,
  a.event_id, a.window_start, a.window_end, a.window_complete, a.arrival, a.decided_at, a.entities, a.score, a.queue, a.tags,
  -- A snooze covers the alerts of its rule whose key has all values of its key.
  filter(
    s.snoozes,
    z -> (z.rule_id IS NULL OR z.rule_id = a.rule_id) AND array_size(filter(
      coalesce(map_entries(z.key), array()),
      e -> NOT (coalesce(array_contains(map_keys(a.key), e.key), false) AND a.key[e.key] <=> e.value)
    )) = 0
  ) AS snoozed_by
FROM numbered a
LEFT ANTI JOIN later l
  ON l.alert_id = a.alert_id
  AND (l.evaluation > a.evaluation OR (l.evaluation = a.evaluation AND l.revision > a.revision))
LEFT ANTI JOIN reviews r ON r.alert_id = a.alert_id
CROSS JOIN active s
WHERE a.verdict = 'raised' AND a.mode = 'active' AND (:until IS NULL OR a.decided_at < :until)
