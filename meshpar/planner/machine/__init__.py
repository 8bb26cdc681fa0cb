"""A machine as the planner sees it: devices, links, and what programs achieve."""
