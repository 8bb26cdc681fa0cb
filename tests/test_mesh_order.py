"""Devices lie in the order of their links, and an axis on a slow one is named."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshpar import MESH_AXES, Layout, Topology, TopologyWarning, make_mesh
from meshpar.audit.report import _slow_axes
from meshpar.machine.mesh import (
    _arrange,
    full_order,
    in_order,
    slow_axes,
    slow_mesh_axes,
)
from meshpar.machine.topology import device_domains

H100 = "NVIDIA H100 80GB HBM3"
GB = 1e9
TWO_HOSTS = Topology(
    hosts=2, devices_per_host=8, host_bytes_per_s=450e9, network_bytes_per_s=50e9
)


def gpu(number, process, domain):
    return SimpleNamespace(
        id=number,
        process_index=process,
        slice_index=domain,
        platform="gpu",
        device_kind=H100,
    )


def tpu(number, slice_index, coords):
    return SimpleNamespace(
        id=number,
        process_index=number // 4,
        slice_index=slice_index,
        platform="tpu",
        device_kind="TPU v5p",
        coords=coords,
        core_on_chip=0,
    )


def slices(number):
    """Slices of 2x2x1 TPUs, in no order."""
    places = [(x, y, 0) for y in range(2) for x in range(2)]
    devices = [
        tpu(4 * index + at, index, coords)
        for index in range(number)
        for at, coords in enumerate(places)
    ]
    return [devices[at] for at in np.random.default_rng(0).permutation(len(devices))]


def domains(mesh_devices):
    return np.array(device_domains(list(mesh_devices.flat))).reshape(mesh_devices.shape)


def test_gpus_that_nvlink_joins_are_neighbours_whatever_their_processes():
    # A rack of 4 processes with 2 GPUs each, numbered in turn with another's.
    devices = [gpu(n, process=n // 2, domain=(n // 2) % 2) for n in range(16)]
    found = _arrange(devices, (2, 8))
    assert domains(found).tolist() == [[0] * 8, [1] * 8]
    assert Topology.from_devices(devices).devices_per_host == 8


@pytest.mark.parametrize(
    "shape", [(4, 1, 1, 1, 1, 4), (2, 2, 1, 1, 1, 4), (8, 1, 1, 1, 1, 2)]
)
def test_slices_of_tpus_lie_along_the_outermost_axes(shape):
    found = _arrange(slices(4), shape).reshape(4, 4)
    of_slice = domains(found)
    assert all(len(set(row)) == 1 for row in of_slice.tolist())
    assert sorted(of_slice[:, 0].tolist()) == [0, 1, 2, 3]
    # JAX's own arrangement inside a slice.
    assert {device.id for device in found.flat} == set(range(16))


def test_tpus_of_one_slice_are_one_domain_whatever_their_processes():
    devices = slices(1) + [
        tpu(4 + at, 0, (x, y, 1))
        for at, (x, y) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)])
    ]
    assert {device.process_index for device in devices} == {0, 1}
    assert Topology.from_devices(devices).hosts == 1


def test_processes_without_slices_are_hosts():
    devices = [
        SimpleNamespace(id=n, process_index=n // 4, platform="cpu", slice_index=0)
        for n in range(8)
    ]
    assert device_domains(devices) == [0] * 4 + [1] * 4


def test_more_gpus_than_nvlink_joins_are_hosts_by_process():
    # So JAX numbers absent ones: one slice of two hosts.
    devices = [gpu(n, process=n // 8, domain=0) for n in range(16)]
    assert device_domains(devices) == [0] * 8 + [1] * 8
    one_each = [gpu(n, process=n, domain=n // 8) for n in range(16)]
    assert device_domains(one_each) == [0] * 8 + [1] * 8


def test_tpus_without_a_slices_number_are_one_slice():
    devices = slices(1)
    for device in devices:
        del device.slice_index
    assert Topology.from_devices(devices).hosts == 1
    found = _arrange(devices, (2, 2))
    assert {device.id for device in found.flat} == {0, 1, 2, 3}


ABSENT = """
import json
import numpy as np
from meshpar.audit.child import _devices
from meshpar.audit.target import Target
from meshpar.machine.mesh import mesh_hosts, make_mesh

found = {}
cases = {"tpu:v5p:2x2x2": "data=2,tensor=4", "gpu:h100:2x8": "data=2,tensor=8"}
for target, layout in cases.items():
    mesh = make_mesh(layout, _devices(Target.parse(target)))
    coords = [list(d.coords) for d in mesh.devices.flat]
    found[target] = [list(mesh_hosts(mesh)), coords]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("libtpu", "flatbuffers"))),
    reason="needs the extra aot",
)
def test_absent_devices_lie_by_torus_and_host():
    environment = {
        **os.environ,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # As in an audit's child: a machine with JAX's CUDA plugin may have no cuDNN.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    command = [sys.executable, "-W", "ignore", "-c", ABSENT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    hosts, coords = found["tpu:v5p:2x2x2"]
    assert set(hosts) == {0}
    # Each group of `tensor` is a face of the cube.
    for face in np.array(coords).reshape(2, 4, 3):
        assert any(len(set(face[:, dim])) == 1 for dim in range(3))
    hosts, _ = found["gpu:h100:2x8"]
    assert hosts == [0] * 8 + [1] * 8


def test_an_order_puts_its_last_axis_on_neighbours():
    mesh = make_mesh("data=2,stage=2,tensor=2", order="tensor,stage,data")
    assert mesh.axis_names == MESH_AXES
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    assert ids[:, 0, 0].tolist() == [0, 1]  # along data
    assert ids[0, :, 0].tolist() == [0, 2]  # along stage
    assert ids[0, 0, :].tolist() == [0, 4]  # along tensor
    plain = make_mesh("data=2,stage=2,tensor=2", order=MESH_AXES)
    assert plain == make_mesh("data=2,stage=2,tensor=2")


def test_tensor_that_an_order_puts_across_hosts_warns():
    topology = Topology(hosts=2, devices_per_host=4)
    with pytest.warns(TopologyWarning, match=r"'tensor' .* 2 .*\b4 devices"):
        make_mesh("data=4,tensor=2", topology=topology, order="tensor,data")


@pytest.mark.parametrize(
    ("order", "refusal"),
    [
        ("data,model", ("mesh.unknown_axis", "'model'")),
        ("data,data,tensor", ("mesh.repeated_axis", "data,data,tensor", "'data'")),
        ("data", ("mesh.missing_axis", "'tensor'")),
    ],
)
def test_an_order_that_is_none_is_refused(order, refusal, refuses):
    with refuses(*refusal):
        make_mesh("data=2,tensor=4", order=order)


def test_an_axis_on_a_slower_link_than_it_could_is_named_with_the_cure():
    # In meshpar's order the pipeline's hops lie inside hosts, and FSDP across them.
    sizes = Layout(fsdp=8, stage=2).mesh_shape
    sent = {("fsdp",): 8 * GB, ("stage",): 0.1 * GB}
    (found,) = slow_axes(TWO_HOSTS, sizes, sent)
    assert found.mesh_axes == ("fsdp",) and found.order == ("stage", "fsdp")
    # Four of its eight devices are in a host: 4 ports of 50 GB/s.
    assert (found.bytes_per_s, found.could_bytes_per_s) == (200e9, 450e9)
    before = 8 / 200 + 0.1 / 450
    assert found.kept_s == pytest.approx((8 / 450 + 0.1 / 50) / before)
    assert str(found) == (
        "mesh axis 'fsdp' sends 8,000.0 MB a step between hosts at 200 GB/s; it could "
        "at 450 GB/s: in the order stage,fsdp (make_mesh(order=), --mesh-order) all "
        "traffic takes 49% of the time"
    )
    # So laid out, nothing is to be said.
    row = np.arange(16) // 8
    hosts = in_order(row, sizes, full_order("stage,fsdp", sizes))
    assert slow_axes(TWO_HOSTS, sizes, sent, hosts=hosts) == ()


@pytest.mark.parametrize(
    ("topology", "layout", "sent"),
    [
        # Tensor sends most, and lies inside.
        (TWO_HOSTS, Layout(data=2, tensor=8), {("tensor",): 9 * GB, ("data",): GB}),
        # It crosses hosts in any order.
        (TWO_HOSTS, Layout(tensor=16), {("tensor",): GB}),
        # One host.
        (Topology(hosts=1, devices_per_host=16), Layout(tensor=16), {("tensor",): GB}),
        (TWO_HOSTS, Layout(data=2, tensor=8), {}),
    ],
)
def test_nothing_is_said_where_no_order_is_faster(topology, layout, sent):
    assert slow_axes(topology, layout.mesh_shape, sent) == ()


def test_tensor_across_hosts_while_data_is_inside_one_is_named():
    devices = jax.devices()
    as_hosts = [gpu(device.id, 0, device.id // 4) for device in devices]
    # A mesh made by hand: data innermost.
    mesh = SimpleNamespace(
        devices=np.array(as_hosts).reshape(4, 2).T.reshape(2, 1, 1, 1, 1, 4),
        shape=Layout(data=2, tensor=4).mesh_shape,
    )
    (found,) = slow_mesh_axes(mesh, {("tensor",): GB, ("data",): 0.01 * GB})
    assert found.mesh_axes == ("tensor",) and found.order == ("data", "tensor")
    assert (found.bytes_per_s, found.could_bytes_per_s) == (100e9, 450e9)


def test_the_audit_knows_the_hosts_of_a_target():
    from meshpar.audit.overlap import target_cluster
    from meshpar.audit.target import Target
    from meshpar.machine.mesh import absent_mesh

    row = SimpleNamespace(mesh_axes=("fsdp",), wire_bytes=10**9, executions=1)
    mesh = absent_mesh("fsdp=8,stage=2")
    cluster = target_cluster(Target.parse("gpu:h100:2x8"))
    (found,) = _slow_axes([row], mesh, cluster)
    assert found.mesh_axes == ("fsdp",) and found.bytes_per_s == 200e9
    assert found.to_json()["order"] == ("stage", "fsdp")
    one_host = target_cluster(Target.parse("gpu:h100:1x16"))
    assert _slow_axes([row], mesh, one_host) == ()
    # FSDP has half of three lines, while a pipeline's hops are inside chips.
    chips = target_cluster(Target.parse("tpu:v7x:2x2x2"))
    (found,) = _slow_axes([row], mesh, chips)
    assert found.order == ("stage", "fsdp")
    assert "a step along the torus at 133.5 GB/s; it could at 178 GB/s" in str(found)
