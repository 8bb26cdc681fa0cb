"""A machine as the planner sees it: devices, links, and the program's overlap.

`cluster.Cluster` says on which link each mesh axis lies, `collective_cost` has the time
of each collective, and `execution` what a program hides.
"""
