"""Rules without Spark: the harness, replay, the tests that a rule carries, and a trial over history."""
