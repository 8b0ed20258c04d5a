"""Shows results to people: tables as text and HTML, pictures, and the live view of a stream.

It must not change anything.
"""
