"""The desks of people who work in a notebook, made of ipywidgets: what waits for them, and buttons to act on it.

A desk knows widgets and calls what the notebooks call; it holds no logic of rules or tables. Each has a model, which knows
neither widgets nor Spark, and a view. Only notebooks import this package: commands and jobs need no ipywidgets.
"""
