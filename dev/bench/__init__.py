"""Measures Lookback, beside other engines on the same events with the same rules. See dev/bench/README.md."""
