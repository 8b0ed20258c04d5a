"""The soak run: kills processes of ingest, authors and evaluation again and again, then compares tables with a replay."""
