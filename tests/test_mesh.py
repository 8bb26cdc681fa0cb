"""A layout becomes a mesh of six automatic axes, `tensor` innermost."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshpar import MESH_AXES, Layout, Topology, make_mesh
from meshpar.machine.mesh import UnusedDevicesWarning


@pytest.mark.parametrize("layout", [Layout(data=8), Layout(data=2, fsdp=2, tensor=2)])
def test_a_mesh_has_all_six_axes_and_all_are_automatic(layout):
    mesh = make_mesh(layout)
    assert mesh.axis_names == MESH_AXES
    assert mesh.axis_types == (AxisType.Auto,) * 6
    assert dict(mesh.shape) == layout.mesh_shape


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_neighbouring_devices_share_a_tensor_group_in_whatever_order_given(order):
    mesh = make_mesh(Layout(data=2, stage=2, tensor=2), jax.devices()[order])
    ids = [device.id for device in mesh.devices.flat]
    assert ids == sorted(ids)
    groups = np.array(ids).reshape(mesh.devices.shape)[:, 0, :, 0, 0, :]
    assert groups.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_an_open_mesh_axis_absorbs_the_devices():
    assert make_mesh(Layout(data=-1, tensor=2)).shape["data"] == 4
    assert make_mesh(Layout(data=-1), jax.devices()[:3]).shape["data"] == 3


def test_a_layout_smaller_than_the_machine_takes_the_first_devices_and_says_so(refuses):
    with pytest.warns(UnusedDevicesWarning, match=r"'data=2' .* 2 .* 8: .* 2 "):
        mesh = make_mesh("data=2")
    assert list(mesh.devices.flat) == jax.devices()[:2]
    with refuses("layout.wrong_device_count", "data=2", 2, 3):
        make_mesh("data=2", jax.devices()[:3])


def test_too_few_devices_are_refused(refuses):
    with refuses("layout.wrong_device_count", "tensor=4", 4, 3):
        make_mesh(Layout(tensor=4), jax.devices()[:3])


def test_a_topology_of_other_devices_is_refused(refuses):
    with refuses("mesh.topology_mismatch", 2, "8 = 16", 8):
        make_mesh(Layout(data=8), topology=Topology(hosts=2, devices_per_host=8))
