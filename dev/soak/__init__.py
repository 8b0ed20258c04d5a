"""The soak run: kills processes of ingest, authors and evaluation again and again, then proves the tables."""
