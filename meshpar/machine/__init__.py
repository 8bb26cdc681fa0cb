"""The devices of a layout: their mesh, the links that mesh axes cross, virtual devices.

`mesh.make_mesh` puts devices on a mesh, `topology` knows their hosts and links,
`mesh_order` compares orders of the mesh axes, and `emulate` starts virtual CPU devices.
What a model computes does not belong here.
"""
