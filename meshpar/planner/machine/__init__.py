"""A machine as the planner sees it: devices, links, and the program's overlap.

`cluster.Cluster` and `link` say which mesh axes lie on which link,
`collective_cost` has the time of each collective, and `execution` what a program hides.
"""
