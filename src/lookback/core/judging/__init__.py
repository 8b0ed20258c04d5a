"""Judges one rule over one segment of a batch, a module for each kind of rule: look-back, aligned windows, sessions, sequences.

It must not know other rules, or when changes of rules take effect.
"""
