"""Judges what is in the events table once more: a rule's alerts over all of history, and the proof of those recorded.

The keys are divided among tasks, each of which walks the commits in order with its state in memory, through the evaluator
of the stream. No events are on the driver, and a task holds those of its keys in one span of commits at a time.
"""
