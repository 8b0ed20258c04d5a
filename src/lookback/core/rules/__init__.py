"""Rule documents: read, checked against a stream, compiled, put in force by version, put into words.

It must not know state or how a rule is judged.
"""
