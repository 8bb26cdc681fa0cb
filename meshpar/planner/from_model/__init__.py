"""Workloads of models and steps, found by tracing them.

The only room of the planner that needs jax.
"""
