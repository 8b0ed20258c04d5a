"""Runs rules without Spark: the harness, replay, the tests in a rule's document, and trials over history."""
