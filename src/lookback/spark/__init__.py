"""Moves rows between Delta tables, Spark and the core. It holds no detection logic."""
