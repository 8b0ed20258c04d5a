"""Desks for working in a notebook, made of ipywidgets: they show what waits for you, with buttons to act on it.

A desk knows widgets and calls the same functions as notebooks; it has no logic of rules or tables. Each has a model,
which knows neither widgets nor Spark, and a view. Only notebooks import this package: commands and jobs need no
ipywidgets.
"""
