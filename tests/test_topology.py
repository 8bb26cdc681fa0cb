"""Each mesh axis lies on one link, and what a slow link costs is said."""

import warnings
from types import SimpleNamespace

import jax
import pytest

from meshpar import Layout, Topology, TopologyWarning, make_mesh
from tests.refusals import check_words


def fake_devices(hosts, device_kind="NVIDIA H100 80GB HBM3"):
    return [
        SimpleNamespace(id=index, process_index=host, device_kind=device_kind)
        for index, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    "topology, layout, expected",
    [
        ((1, 8), "data=2,tensor=4", {"data": "host", "tensor": "host"}),
        ((2, 4), "data=2,tensor=4", {"data": "network", "tensor": "host"}),
        ((4, 2), "data=2,tensor=4", {"data": "network", "tensor": "network"}),
        (
            (4, 2),
            "data=2,fsdp=2,tensor=2",
            {"data": "network", "fsdp": "network", "tensor": "host"},
        ),
        (
            (2, 4),
            "data=2,fsdp=2,tensor=2",
            {"data": "network", "fsdp": "host", "tensor": "host"},
        ),
        ((2, 3), "data=2,tensor=3", {"data": "network", "tensor": "host"}),
        ((2, 3), "data=3,tensor=2", {"data": "network", "tensor": "network"}),
        ((2, 8), "stage=2,context=2,tensor=2,expert=2", {
            "stage": "network", "context": "host", "expert": "host", "tensor": "host",
        }),
        ((8, 1), "", {}),
    ],
)  # fmt: skip
def test_every_mesh_axis_lies_on_the_slowest_link_it_crosses(
    topology, layout, expected
):
    hosts, devices_per_host = topology
    links = Topology(hosts=hosts, devices_per_host=devices_per_host).links(
        Layout.parse(layout) if layout else Layout()
    )
    assert {axis: link for axis, link in links.items() if link != "none"} == expected


@pytest.mark.parametrize(
    "speeds, cost",
    [
        ({}, ()),
        ({"host_bytes_per_s": 450e9}, ()),
        (
            {"host_bytes_per_s": 450e9, "network_bytes_per_s": 50e9},
            ("50 GB/s", "450 GB/s", "9 times"),
        ),
    ],
)
def test_a_tensor_axis_across_hosts_warns_and_names_the_cost(speeds, cost, snapshot):
    topology = Topology(hosts=2, devices_per_host=4, **speeds)
    with pytest.warns(TopologyWarning) as caught:
        make_mesh(Layout(tensor=8), topology=topology)
    assert caught[0].filename == __file__
    values = ("'tensor'", 8, 4, *cost)
    check_words(str(caught[0].message), "TopologyWarning", values, snapshot)


@pytest.mark.parametrize("layout", [Layout(data=8), Layout(data=2, tensor=4)])
def test_a_tensor_axis_inside_a_host_does_not_warn(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_mesh(layout, topology=Topology(hosts=2, devices_per_host=4))


@pytest.mark.parametrize(
    "kind, host_bytes_per_s, network_bytes_per_s",
    [
        ("NVIDIA A100-SXM4-80GB", 300e9, 25e9),
        ("NVIDIA H100 80GB HBM3", 450e9, 50e9),
        ("NVIDIA H200", 450e9, 50e9),
        ("NVIDIA A100-SXM4-40GB", 300e9, 25e9),
        ("NVIDIA B200", 900e9, 50e9),
        ("cpu", None, None),
        ("NVIDIA A1000", None, None),
        ("NVIDIA RTX A1000 Laptop GPU", None, None),
        ("NVIDIA A100X", None, None),
        ("NVIDIA GB200", None, None),
        ("NVIDIA A100-PCIE-40GB", None, None),
        ("NVIDIA A100 80GB PCIe", None, None),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA H100 NVL", None, None),
        ("NVIDIA H200 NVL", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
    ],
)
def test_hosts_and_speeds_are_read_from_the_devices(
    kind, host_bytes_per_s, network_bytes_per_s
):
    assert Topology.from_devices(fake_devices([0, 0, 1, 1], kind)) == Topology(
        hosts=2,
        devices_per_host=2,
        host_bytes_per_s=host_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
    )


def test_virtual_devices_are_one_host():
    topology = Topology.from_devices(jax.devices())
    assert (topology.hosts, topology.devices_per_host, topology.num_devices) == (
        1,
        8,
        8,
    )


@pytest.mark.parametrize(
    "hosts, held",
    [([0, 0, 1], "{0: 2, 1: 1}"), ([], "{}")],
)
def test_hosts_of_unequal_size_are_refused(hosts, held, refuses):
    with refuses("mesh.uneven_hosts", held):
        Topology.from_devices(fake_devices(hosts))


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"hosts": 0}, ("value.below_one", "hosts=0", 1)),
        ({"devices_per_host": -1}, ("value.below_one", "devices_per_host=-1", 1)),
        (
            {"host_bytes_per_s": 0.0},
            ("value.not_positive", "host_bytes_per_s=0.0"),
        ),
        (
            {"network_bytes_per_s": float("nan")},
            ("value.not_positive", "network_bytes_per_s=nan"),
        ),
    ],
)
def test_a_topology_that_makes_no_sense_is_refused(changes, refusal, refuses):
    with refuses(*refusal):
        Topology(**{"hosts": 2, "devices_per_host": 4, **changes})
