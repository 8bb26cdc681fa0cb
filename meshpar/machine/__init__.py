"""The devices of a layout: their mesh, the links that mesh axes cross, virtual devices.

`mesh.make_mesh` puts devices on a mesh, in the best order of its axes, `topology` knows
their hosts and links, and `emulate` starts virtual CPU devices.
What a model computes does not belong here.
"""
