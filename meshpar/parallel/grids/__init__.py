"""Grids, volumes and pairs whose dims devices share: halos, transforms, triangles.

`space` says how inputs are split and what refuses it, `convolution` sends halos,
`pencils` orders the moves of `meshpar.fft`, and `pairs` has the products and attention
of pair representations.
"""
