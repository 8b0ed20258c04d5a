"""Judges one rule over one segment of a batch.

`lateness` decides which events are late, `measuring` measures windows, `verdicts` decides what is raised, revised or
retracted, and `segment` has what judges of all kinds share. Each kind of rule has one module with its state and its logic:
`lookbacks`, `tiled`, `sessions`, `sequences`. It must not know other rules, or when changes of rules take effect.
"""
