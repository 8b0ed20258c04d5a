"""Shows why an alert was raised: its events, its measures and each part of its condition.

It must not write anything, nor decide by itself which events count: it replays the events through the engine.
"""
