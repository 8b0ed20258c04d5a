"""Decides whether a stream is well and whom an alert is sent to.

It must not know how rules are judged.
"""
