"""The running evaluation: one streaming query from the tables of events and rules to the tables of alerts and logs.

It must not know who reviews alerts or who is notified.
"""
