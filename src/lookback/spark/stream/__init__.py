"""The running evaluation: a streaming query from the events and rules tables to the alerts and log tables.

This package must not know who reviews alerts or who is notified.
"""
