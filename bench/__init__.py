"""Measures Lookback, beside other engines on the same events with the same rules. See bench/README.md."""
