"""A model as the planner sees it: shapes, FLOPs, activations."""
