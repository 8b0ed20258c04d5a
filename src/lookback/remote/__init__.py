"""Jobs of a Databricks workspace: are they deployed, do they run, is the stream healthy."""
