"""The machine below: the Spark session, JARs, secrets, owners of checkpoints, and what failures of the platform mean.

It must not know tables or streams.
"""
