"""This machine's devices and links, measured for the planner.

`measure.calibrate` times matmuls and exchanges (`trials`), `fit` turns times into
constants, `measure.device_toml` writes them, and `fit.fitted_efficiency` fits measured
steps. Data sheets are `meshpar.hardware`'s.
"""
