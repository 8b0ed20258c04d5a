"""Judges events by rules. It knows no Spark, no files and no clock: time is an argument, and so is the store of its state."""
