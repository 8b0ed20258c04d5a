"""Shows why an alert was raised: its events, its measures and each part of its condition.

It must not write anything.
"""
