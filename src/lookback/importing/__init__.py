"""Turns rules of other systems into rule documents, and says of each how faithful it is. Knows no Spark and no tables.

A reader of one format makes `detections.Detection`s; one writer turns them into documents, whatever the format.
"""
