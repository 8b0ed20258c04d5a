"""The parts for writing a rule: its text and form, checks, trials with their sliders, and publication.

This package must not know the layout of the page that shows its parts.
"""
