"""Judges one rule over one segment of a batch.

`lateness` decides which events are late, `measuring` measures windows, `verdicts` decides which alerts are raised,
revised or retracted, and `segment` has what all judges share. Each kind of rule has one module with its state and
logic: `lookbacks`, `tiled`, `sessions`, `sequences`. This package must not know about other rules or when rule changes
take
effect.
"""
