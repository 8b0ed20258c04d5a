"""Reads rule documents, binds them to a stream, knows which version is in force, and describes a rule in words.

It must not know state or how a rule is judged.
"""
