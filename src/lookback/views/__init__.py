"""What a person looks at: tables as text and HTML, pictures, the live view of a stream.

It must not change anything.
"""
