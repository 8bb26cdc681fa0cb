"""Answer what a layout costs before anything runs: memory, seconds, bytes sent.

`cost.estimate.estimate` answers for one layout of a transformer, `search.search.search`
for all of them, `inference.estimate_inference` for generation, `curve.scaling_curve`
for more and more devices; `plan.Plan` is the answer for volumes and tables. Arithmetic
only: jax must not enter, except in `from_model`, which traces models.
"""
