"""Published runs, and the planner's error against them."""
