"""Takes a batch of events and changes of rules through all rules in order, and takes out of service a rule that breaks.

It must not know where events come from or alerts go.
"""
