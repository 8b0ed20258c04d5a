"""Soak: ingest, rule changes and evaluation as processes of their own, killed again and again, then compared with a replay."""
