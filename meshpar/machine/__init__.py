"""Devices as a named mesh: which link each mesh axis lies on, and virtual devices.

`mesh.make_mesh` puts devices on a mesh, `topology` knows their hosts and links,
`mesh_order` compares orders of the mesh axes, and `emulate` starts virtual CPU devices.
"""
