"""Brings rows of files and Kafka topics into the table of a stream, and sets apart those that cannot be used.

It must not know rules.
"""
