"""Benchmarks, soak runs and tools: for people who work on Lookback. Users need none of it."""
