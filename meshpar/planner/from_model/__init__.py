"""What would a user's own model or step cost? It is traced to find out.

`block.traced_workload` makes a workload of a model, `step.planned_run` a run of a step,
`step.traced_volume` a workload of a model of volumes. The only room of the planner that
needs jax.
"""
