"""This machine's devices and links, measured for the planner.

`measure.calibrate` times matmuls and exchanges (`trial`, `exchanges`, `kernels`), `fit`
turns times into constants, `device_file.device_toml` writes them, and
`fit_plans.fitted_efficiency` fits measured steps. Data sheets are `meshpar.hardware`'s.
"""
