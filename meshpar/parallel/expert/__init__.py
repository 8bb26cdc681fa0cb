"""Experts on several devices: rows sent to them, multiplied, and sent back.

`experts.routed_mlp` is what models call; `rounds` sends, multiplies and returns rows,
`routes` says which go where in which round, `exchange` and `host_exchange` send them,
and `tiles` multiplies rows of many experts at once. Routing is the model's.
"""
