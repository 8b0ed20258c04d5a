"""Ingests files and Kafka topics into a stream's events table, and stores unusable rows separately.

This package must not know rules.
"""
