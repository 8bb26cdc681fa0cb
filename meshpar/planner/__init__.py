"""Answer what a layout costs before anything runs: memory, seconds, bytes sent.

Every answer for a training step is a `plan.Plan`: `cost.estimate.estimate` makes that
of one layout of a transformer, `search.search.search` those of all layouts, `volumes`
that of volumes, `curve.scaling_curve` those of more and more devices.
`inference.estimate_inference` answers for generation. Arithmetic only: jax must not
enter, except in `from_model` and `volume_traces`, which trace models.
"""
