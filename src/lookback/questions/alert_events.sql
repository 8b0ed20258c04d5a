-- The events of the stream `alerts`, from rows of its table or change feed: a row is an event if an alert begins or
-- ceases to stand with it, one for each of its entities, and one without an entity if it has none. Alerts of rules over
-- alerts are not events, so that no rule triggers itself.
SELECT
  * EXCEPT (about, entities, score),
  -- All rows of a batch have the same time and are evaluated in the order of their ids. Alerts that cease come first, so
  -- that the number of standing alerts is never too high.
  concat(
    CASE WHEN change = -1 THEN 'ceases:' ELSE 'stands:' END, alert_id, '.', CAST(revision AS STRING),
    coalesce(concat('.', about.key), '')
  ) AS change_id,
  about.key AS entity,
  about.value AS entity_id,
  score * change AS score,
  CAST(NULL AS TIMESTAMP) AS ingested_at
FROM (
  SELECT
    *,
    explode(
      CASE
        WHEN array_size(map_entries(entities)) > 0 THEN map_entries(entities)
        ELSE array(named_struct('key', CAST(NULL AS STRING), 'value', CAST(NULL AS STRING)))
      END
    ) AS about
  FROM alert_rows
  WHERE change <> 0 AND stream <> 'alerts'
) AS listed
