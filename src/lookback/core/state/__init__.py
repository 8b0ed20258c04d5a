"""Keeps what a shard remembers between batches, as pages in a key-value store.

It must not know how a rule is judged.
"""
