"""One rule while it is written: its text and form, checks, trials with their sliders, and the way to publication.

This package must not know how the page that shows its parts is laid out.
"""
