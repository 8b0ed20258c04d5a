-- The first rows of a rule's alerts in one evaluation: up to the commit :arrival, decided at :since (microseconds) or later.
SELECT * FROM alerts
WHERE rule_id = :rule_id AND revision = 0
  AND (:arrival IS NULL OR arrival <= :arrival) AND (:since IS NULL OR decided_at >= timestamp_micros(:since))
  AND (:begun_at IS NULL OR decided_at > :begun_at) AND (:ended_at IS NULL OR decided_at <= :ended_at)
