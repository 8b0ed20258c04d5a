"""Judges the events table again: backtests rules over all of history, and proves the recorded alerts.

The keys are divided among tasks. Each task runs the stream's evaluator over the commits in order, with its state in
memory. The driver holds no events; a task holds the events of its keys for one span of commits at a time.
"""
