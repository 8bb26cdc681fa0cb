"""Hardware by its makers' words: devices, platforms, compiler options. Without JAX.

`devices.DEVICES` has one entry a device, each number with a source;
`platforms.Platform` has what differs between CPU, GPU and TPU; `attention_choice`
chooses a kernel, and `compiler_options` has XLA's options. What programs achieve is
measured by `meshpar.calibration`.
"""
