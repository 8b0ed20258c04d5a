"""Brings rows of files and Kafka topics into the table of a stream, and sets apart those that cannot be used.

This package must not know rules.
"""
