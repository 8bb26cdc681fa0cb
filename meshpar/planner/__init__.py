"""The planner: arithmetic over a workload, a cluster and a layout. Without jax."""
