"""Hardware by its makers' words: devices, platforms, compiler options. Without JAX.

`devices.DEVICES` has one entry a device, each number with a source;
`platforms.Platform` has what differs between CPU, GPU and TPU, with XLA's options;
`attention_kernels` chooses a kernel. What programs achieve is measured by
`meshpar.calibration`.
"""
