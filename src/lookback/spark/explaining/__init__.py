"""Explains alerts and events: reads the history of one key, and has the core judge it again.

It only reads tables; `core.explaining` decides what an explanation says.
"""
