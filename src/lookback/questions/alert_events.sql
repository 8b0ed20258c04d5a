-- The events of the stream `alerts`, from rows of its table or change feed: a row is an event if an alert begins or
-- ceases to stand with it, one for each of its entities. Alerts of rules over alerts are not events, so that no rule triggers itself.
SELECT
  * EXCEPT (entities, score),
  -- All rows of a batch have the same time and are evaluated in the order of their ids. Alerts that cease come first, so
  -- that the number of standing alerts is never too high.
  concat(
    CASE WHEN change = -1 THEN 'ceases:' ELSE 'stands:' END, alert_id, '.', CAST(revision AS STRING),
    coalesce(concat('.', entity), '')
  ) AS change_id,
  score * change AS score,
  CAST(NULL AS TIMESTAMP) AS ingested_at
FROM alert_rows LATERAL VIEW OUTER explode(entities) AS entity, entity_id
WHERE change <> 0 AND stream <> 'alerts'
