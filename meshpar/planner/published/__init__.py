"""Answer how wrong the planner is about published runs.

`validate.rows` compares every number of `published.json` with an estimate. What it
says about our own programs is no part of it.
"""
