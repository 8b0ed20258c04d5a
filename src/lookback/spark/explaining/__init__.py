"""Explains alerts and events: reads the history of one key, and lets the core judge it again.

It reads tables and writes none; what an explanation says is decided in `core.explaining`.
"""
