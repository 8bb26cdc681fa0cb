"""Hardware: names, files, which link a mesh axis runs on, what a collective costs."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from meshpar.audit import targets
from meshpar.audit.target import Target
from meshpar.data.token_files import TokenStream
from meshpar.hardware.devices import DEVICES, TARGET_NAMES, TARGETS, device_from_kind
from meshpar.layout import Layout
from meshpar.machine.topology import Topology
from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.clusters import cluster_of, device_of, load_device
from meshpar.planner.machine.collective_cost import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
    wire_bytes,
)
from meshpar.planner.search.space import Constraints

FAST = Link(name="host", bytes_per_s=100e9, hop_s=0.0)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_is_found_by_its_name_and_achieves_less_than_its_peak(name):
    device = device_of(name)
    assert device is DEVICES[name]
    assert device.peak_flops["bf16"] >= device.peak_flops["fp32"]
    assert device.network_bytes_per_s < device.link_bytes_per_s
    assert device.efficiency.matmul < 1


@pytest.mark.parametrize(
    "text, name", [("h100", "h100-80gb"), ("TPU v5p", "tpu-v5p"), ("v6e", "tpu-v6e")]
)
def test_short_names(text, name):
    assert device_of(text).name == name


@pytest.mark.parametrize(
    "hardware, options, hosts, devices",
    [
        ("h100-80gb", {}, 1, 8),
        ("h100-80gb", {"devices": 4}, 1, 4),
        ("h100-80gb", {"devices": 64}, 8, 64),
        ("h100-80gb", {"devices": 8, "hosts": 4}, 4, 8),
        ("h100-80gb", {"hosts": 4}, 4, 32),
        ("gb200", {"devices": 144}, 2, 144),
        ("tpu v5p:8x8x8", {}, 1, 512),
        ("tpu-v5e:16x16", {"hosts": 2}, 2, 512),
        ("tpu-v5p", {"devices": 128}, 1, 128),
    ],
)
def test_clusters(hardware, options, hosts, devices):
    cluster = cluster_of(hardware, **options)
    assert (cluster.hosts, cluster.num_devices) == (hosts, devices)


@pytest.mark.parametrize(
    "hardware, options, refusal",
    [
        ("h101", {}, ("hardware.unknown_device", "'h101'", "'h100'")),
        ("h100-80gb", {"devices": 0}, ("hardware.count_below_one", "devices=0", 1)),
        (
            "h100-80gb",
            {"devices": 10, "hosts": 4},
            ("hardware.indivisible_hosts", 10, 4),
        ),
        ("h100-80gb:8x8", {}, ("hardware.no_torus", "h100-80gb", "':8x8'")),
        ("tpu-v5p", {}, ("hardware.missing_torus", "tpu-v5p", "tpu-v5p:4x4x4")),
        ("tpu-v5p:8x8", {}, ("hardware.wrong_torus_dims", "8x8", 2, "tpu-v5p", 3)),
        ("tpu-v5e:8by8", {}, ("hardware.unreadable_torus", "'8by8'")),
        ("tpu-v5e:8x8", {"devices": 65}, ("hardware.torus_device_mismatch", 64, 65)),
    ],
)
def test_clusters_that_cannot_be_are_refused(hardware, options, refusal, refuses):
    with refuses(*refusal):
        cluster_of(hardware, **options)


@pytest.mark.parametrize(
    "layout",
    ["data=2,tensor=8", "data=4,tensor=4", "data=2,stage=2,tensor=4", "fsdp=16"],
)
def test_a_mesh_axis_lies_on_the_link_that_the_topology_says(layout):
    layout = Layout.parse(layout)
    cluster = cluster_of("h100-80gb", devices=layout.num_devices)
    links = Topology(hosts=2, devices_per_host=8).links(layout)
    for axis, link in links.items():
        assert cluster.link(layout, axis).name == link


def test_rings_use_the_ports_of_all_their_members_in_a_host():
    cluster = cluster_of("h100-80gb", devices=64)
    one = cluster.link(Layout(data=8, tensor=8), "data")
    four = cluster.link(Layout(data=32, tensor=2), "data")
    every = cluster.link(Layout(data=64), "data")
    assert (one.inner, four.inner, every.inner) == (1, 4, 8)
    assert four.bytes_per_s == 4 * one.bytes_per_s
    # No faster than the link inside the host.
    assert (
        every.bytes_per_s
        == cluster.link(Layout(data=8, tensor=8), "tensor").bytes_per_s
    )


def test_in_a_host_without_a_switch_a_group_has_the_links_between_its_members():
    cluster = cluster_of("mi300x", devices=16)
    one = cluster.device.link_bytes_per_s / 7 * cluster.device.efficiency.link
    for size in (2, 4, 8):
        layout = Layout(data=16 // size, tensor=size)
        link = cluster.link(layout, "tensor")
        assert link.bytes_per_s == pytest.approx((size - 1) * one)
        assert link.port_bytes_per_s == pytest.approx(one)
        # A part for each other member, over the link to it.
        assert all_to_all_s(8e9, size, link) == pytest.approx(
            8e9 / size / one, rel=1e-3
        )
    switched = cluster_of("h100", devices=16)
    links = [
        switched.link(Layout(data=16 // size, tensor=size), "tensor") for size in (2, 8)
    ]
    assert links[0] == links[1]


def test_amd_s_gpus_are_known_by_their_kind_and_are_compiled_for_by_nobody(refuses):
    device = device_from_kind("AMD Instinct MI300X")
    assert device is not None and device.name == "mi300x-192gb"
    assert not device.compute_capability and device.name not in TARGET_NAMES
    with refuses("hardware.not_true_or_false", "meshed='no'"):
        dataclasses.replace(device, meshed="no")
    with refuses("hardware.mixed_vendors", "h100-80gb + mi300x-192gb"):
        cluster_of("h100:8+mi300x:8")


def test_a_ring_of_a_torus_has_two_links_where_its_ends_are_joined():
    cluster = cluster_of("tpu-v5p:8x8x8")
    whole = cluster.link(Layout(data=64, tensor=8), "tensor")
    part = cluster.link(Layout(data=128, tensor=4), "tensor")
    plane = cluster.link(Layout(data=8, fsdp=64), "fsdp")
    assert whole.bytes_per_s == 2 * part.bytes_per_s
    assert plane.bytes_per_s == 2 * whole.bytes_per_s
    open_ends = cluster_of("tpu-v5e:8x8").link(Layout(data=8, tensor=8), "tensor")
    assert open_ends.bytes_per_s == 50e9 * 0.9


def test_devices_of_a_chip_share_its_links(refuses):
    """A v7x chip is two devices, neighbours in the mesh; its sizes count chips."""
    cluster = cluster_of("v7x:4x4x4")
    assert cluster.num_devices == 128
    assert cluster_of("v7x", devices=128).torus == cluster.torus
    pair = cluster.link(Layout(data=64, tensor=2), "tensor")
    assert (pair.name, pair.spans, pair.bytes_per_s) == ("chip", (), 600e9 * 0.89)
    whole = cluster.link(Layout(fsdp=128), "fsdp")
    beside = cluster.link(Layout(data=64, tensor=2), "data")
    assert whole.spans == beside.spans == ((4, 2),) * 3
    assert whole.bytes_per_s == 2 * beside.bytes_per_s == 6 * 100e9 * 0.89
    # Google's all-gather of 4 chips: 178.8 GB/s of a chip, whose devices do one each.
    plane = cluster_of("v7x:2x2x1").link(Layout(data=4, tensor=2), "data")
    assert 2 * plane.bytes_per_s == pytest.approx(178.8e9, rel=0.01)
    with refuses("hardware.torus_device_mismatch", 128, 64):
        cluster_of("v7x:4x4x4", devices=64)


def test_between_slices_there_is_the_network():
    cluster = cluster_of("tpu-v5e:16x16", hosts=2)
    layout = Layout(data=2, fsdp=256)
    assert cluster.link(layout, "data").name == "network"
    assert cluster.link(layout, "fsdp").name == "torus"


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_sum_costs_a_scatter_and_a_gather(size):
    gather_s = all_gather_s(8e9, size, FAST)
    assert all_reduce_s(8e9, size, FAST) == pytest.approx(2 * gather_s)
    assert gather_s == pytest.approx(8e9 * (size - 1) / size / 100e9)


def test_small_sums_take_a_tree_large_ones_a_ring():
    slow = Link(name="network", bytes_per_s=50e9, hop_s=1e-5)
    small = all_reduce_s(1e3, 512, slow)
    assert small == pytest.approx(2 * math.log2(512) * 1e-5, rel=0.01)
    assert all_reduce_s(1e11, 512, slow) == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    "hardware, devices, hosts, port_bytes_per_s",
    [
        ("h100-80gb", 64, 8, 50e9 * 0.9),
        # NVLink limits their rings, but not their ports.
        ("h800-80gb", 64, 8, 50e9 * 0.9),
        ("gb200-186gb", 144, 2, 50e9 * 0.9),
        ("tpu-v5e", 512, 2, 3.125e9 * 0.8),
    ],
)
def test_an_all_to_all_leaves_a_host_through_one_port(
    hardware, devices, hosts, port_bytes_per_s
):
    cluster = cluster_of(hardware, devices=devices, hosts=hosts)
    own = devices // hosts
    link = cluster.link(Layout(expert=devices), "expert")
    assert (link.name, link.inner) == ("network", own)
    away = 8e9 * (1 - own / devices) / port_bytes_per_s
    assert all_to_all_s(8e9, devices, link) == pytest.approx(away, rel=1e-3)
    assert send_s(8e9, link) == pytest.approx(8e9 / port_bytes_per_s, rel=1e-3)


def test_an_all_to_all_in_a_host_sends_what_a_device_does_not_keep():
    within = Link(name="host", bytes_per_s=400e9, hop_s=0.0)
    assert all_to_all_s(8e9, 8, within) == pytest.approx(8e9 * 7 / 8 / 400e9)


@pytest.mark.parametrize("stages", [8, 64])
def test_a_hop_takes_one_link_of_a_torus(stages):
    link = cluster_of("tpu-v5p:8x8x8").link(
        Layout(data=512 // stages, stage=stages), "stage"
    )
    assert send_s(1e9, link) == pytest.approx(1e9 / 90e9, rel=1e-3)


@pytest.mark.parametrize(
    "torus, hops",
    # A quarter of a ring for each of two links; of a line, for its one.
    [("8x8x8", 8 / 4 / 2), ("4x8x16", 16 / 4 / 2), ("2x2x8", 8 / 4)],
)
def test_an_all_to_all_of_a_torus_is_as_slow_as_its_longest_dim(torus, hops):
    cluster = cluster_of(f"tpu-v5p:{torus}")
    link = cluster.link(Layout(expert=cluster.num_devices), "expert")
    found_s = all_to_all_s(1e9, cluster.num_devices, link)
    assert found_s == pytest.approx(hops * 1e9 / 90e9, rel=0.01)
    line = cluster_of("tpu-v5e:8x8").link(Layout(data=8, expert=8), "expert")
    assert all_to_all_s(1e9, 8, line) == pytest.approx(2 * 1e9 / 45e9, rel=0.01)


def test_a_gather_on_a_torus_takes_the_steps_of_one_ring_a_dim():
    cluster = cluster_of("tpu-v5p:8x8x8")
    link = cluster.link(Layout(fsdp=512), "fsdp")
    assert all_gather_s(0, 512, link) == pytest.approx(21e-6)
    # Two mesh axes that cover one dim together are one ring.
    both = cluster.link(Layout(data=64, fsdp=2, tensor=4), "fsdp", "tensor")
    assert both.spans == ((8, 2),)
    none = cluster_of("tpu-v5e:8x8").link(
        Layout(data=-1, tensor=3).resolve(63), "tensor"
    )
    assert none.spans == ((3, 1),)


@pytest.mark.parametrize(
    "torus, whole",
    [
        *((f"tpu-v5p:{torus}", True) for torus in ("2x2x2", "2x2x4", "4x4x4")),
        *((torus, True) for torus in ("tpu-v5e:4x4", "tpu-v6e:8x8")),
        ("tpu-v5p:2x2x1", False),
        *((f"tpu-v7x:{torus}", False) for torus in ("2x2x1", "2x2x2", "4x4x4")),
        *((f"tpu-v5e:{torus}", False) for torus in ("2x2", "2x4", "4x8")),
    ],
)
def test_a_tpu_reduces_at_once_over_a_whole_slice_of_some_shapes(torus, whole):
    cluster = cluster_of(torus)
    size = cluster.num_devices
    link = cluster.link(Layout(fsdp=size), "fsdp")
    assert link.scatters_whole == whole
    taken_s = (2 if whole else 1) * all_gather_s(1e9, size, link)
    assert reduce_scatter_s(1e9, size, link) == taken_s
    part = cluster.link(Layout(fsdp=size // 2, tensor=2), "fsdp")
    assert not part.scatters_whole
    slices = cluster_of(torus, devices=2 * size, hosts=2)
    assert not slices.link(Layout(data=2, fsdp=size), "data", "fsdp").scatters_whole


@pytest.mark.parametrize(
    "kind, share",
    [("all-gather", 0.75), ("all-reduce", 1.5), ("collective-permute", 1.0)],
)
def test_bytes_on_the_wire_are_those_of_the_audit(kind, share):
    assert wire_bytes(kind, 1000, 4) == 1000 * share
    assert wire_bytes(kind, 1000, 1) == 0


def test_a_file_describes_a_device(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "a100-80gb"\nmemory_bytes = 64e9\n[efficiency]\nmatmul = 0.5\n'
        "[peak_flops]\nfp32 = 19.5e12\n"
    )
    device, base = load_device(path), DEVICES["a100-80gb"]
    assert (device.memory_bytes, device.efficiency.matmul) == (64e9, 0.5)
    assert device.peak_flops == {"bf16": 312e12, "fp32": 19.5e12}
    assert device.efficiency.memory == base.efficiency.memory
    assert cluster_of(str(path), devices=16).hosts == 2


@pytest.mark.parametrize(
    "content, refusal",
    [
        (
            "memory_bytes = 64e9",
            ("hardware.missing_field", "[efficiency]", "matmul, attention"),
        ),
        ('like = "a100-80gb"\nmemry = 1', ("hardware.unknown_field", "'memry'")),
        (
            'like = "a100-80gb"\n[efficiency]\nmatmul = 1.5',
            ("hardware.not_a_fraction", "matmul=1.5", 0, 1),
        ),
        (
            'like = "a100-80gb"\n[efficiency]\nmatmull = 1',
            ("hardware.unknown_field", "[efficiency]", "'matmull'"),
        ),
        (
            'like = "a100-80gb"\nmemory_bytes = -1',
            ("hardware.not_positive", "memory_bytes=-1"),
        ),
        (
            'like = "a100-80gb"\nefficiency = 1',
            ("hardware.not_a_table", "[efficiency]"),
        ),
        ("like = ", ("hardware.unreadable_toml", "mine.toml")),
    ],
)
def test_files_that_describe_none_are_refused(tmp_path, content, refusal, refuses):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with refuses(*refusal, words=content != "like = "):  # Python's own, of its tomllib
        load_device(path)


@pytest.mark.parametrize(
    "content, refusal",
    [
        (
            '[efficiency]\nmatmul = "fast"',
            ("hardware.not_a_number", "matmul='fast'"),
        ),
        ('torus_dims = "2"', ("hardware.not_whole_number", "torus_dims='2'", 0)),
        ("torus_dims = -1", ("hardware.not_whole_number", "torus_dims=-1", 0)),
        (
            "domain_devices = 8.5",
            ("hardware.not_whole_number", "domain_devices=8.5", 1),
        ),
        (
            "domain_devices = true",
            ("hardware.not_whole_number", "domain_devices=True", 1),
        ),
        ("memory_bytes = true", ("hardware.not_positive", "memory_bytes=True")),
        ("name = 3", ("hardware.name_not_text", "name=3")),
        (
            'platform = "npu"',
            ("hardware.unknown_platform", "platform='npu'", "gpu, tpu, cpu"),
        ),
        ("chip_devices = 2", ("hardware.chip_without_links", "chip_devices=2")),
    ],
)
def test_files_with_values_of_another_type_are_refused(
    tmp_path, content, refusal, refuses
):
    path = tmp_path / "mine.toml"
    path.write_text(f'like = "a100-80gb"\n{content}')
    with refuses(*refusal):
        load_device(path)


def test_a_file_that_starts_from_itself_is_refused(tmp_path, refuses):
    path = tmp_path / "mine.toml"
    path.write_text(f'like = "{path}"')
    with refuses("hardware.like_is_file", "mine.toml", "a100-80gb"):
        load_device(path)


def test_a_file_of_a_torus_takes_its_sizes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "tpu-v5e"\nmemory_bytes = 8e9')
    assert cluster_of(f"{path}:4x4").num_devices == 16


@pytest.mark.parametrize(
    "hardware, devices, hosts, refusal",
    [
        (
            *("h100-80gb", 64, 1),
            ("hardware.too_many_devices_per_host", 64, 8, "--hosts 8"),
        ),
        (
            *("gb200", 144, 1),
            ("hardware.too_many_devices_per_host", 144, 72, "--hosts 2"),
        ),
        ("tpu-v5p", 2, 3, ("hardware.indivisible_slices", 2, 3)),
    ],
)
def test_hosts_that_no_link_joins_are_refused(
    hardware, devices, hosts, refusal, refuses
):
    with refuses(*refusal):
        cluster_of(hardware, devices=devices, hosts=hosts)


def test_numbers_of_data_sheets():
    """NVIDIA's and Google's, dense, as README states them."""
    peaks = {name: device.peak_flops["bf16"] for name, device in DEVICES.items()}
    assert peaks["a100-80gb"] == 312e12
    assert peaks["h100-80gb"] == peaks["h200-141gb"] == 989.4e12
    assert (peaks["b200-180gb"], peaks["gb200-186gb"]) == (2.25e15, 2.5e15)
    fp8 = {name: each.peak_flops.get("fp8", 0) for name, each in DEVICES.items()}
    assert (fp8["h100-80gb"], fp8["gb300-288gb"]) == (1978.8e12, 5e15)
    assert fp8["tpu-v7x"] == 2 * peaks["tpu-v7x"] == 4614e12 / 2
    assert fp8["a100-80gb"] == fp8["tpu-v6e"] == 0
    assert [peaks[f"tpu-v{name}"] for name in ("4", "5e", "5p", "6e")] == [
        275e12,
        197e12,
        459e12,
        918e12,
    ]
    h100, h800 = DEVICES["h100-80gb"], DEVICES["h800-80gb"]
    assert (h100.memory_bytes_per_s, h100.link_bytes_per_s) == (3.35e12, 450e9)
    assert (h800.link_bytes_per_s, h800.network_bytes_per_s) == (200e9, 50e9)
    assert DEVICES["tpu-v5p"].link_bytes_per_s == 100e9


@pytest.mark.parametrize("name", sorted(TARGET_NAMES))
def test_audit_and_planner_have_one_number_for_the_memory_of_a_device(name):
    device, torus_dims = device_of(name), DEVICES[name].torus_dims
    target = Target.parse(f"{TARGET_NAMES[name]}:{'x'.join(['2'] * (torus_dims or 2))}")
    assert target.memory_bytes == device.memory_bytes
    assert target.platform == device.platform


@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("gpu:")])
def test_a_gpu_has_the_memory_that_its_compiler_is_told(name):
    folder = Path(targets.__file__).parent / "gpu_targets"
    text = (folder / f"{name.removeprefix('gpu:')}.txtpb").read_text()
    [told] = re.findall(r"device_memory_size: (\d+)", text)
    assert TARGETS[name].memory_bytes == int(told)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H800", "h800-80gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA GB200", "gb200-186gb"),
        ("NVIDIA GB300", "gb300-288gb"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-v7x"),
    ],
)
def test_a_device_is_known_by_what_jax_calls_it(kind, name):
    assert device_from_kind(kind) is DEVICES[name]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "TPU v7", "NVIDIA A1000"])
def test_a_device_of_other_figures_is_not_taken_for_a_known_one(kind):
    assert device_from_kind(kind) is None


@pytest.mark.parametrize(
    "name", ["Constraints.of", "TokenStream.of", "Cluster.link_of"]
)
def test_a_method_that_was_renamed_still_works_by_its_old_name(name):
    with pytest.warns(DeprecationWarning, match=f"{name} is now"):
        if name == "Constraints.of":
            assert Constraints.of(keep=["tensor=8"]).kept == {"tensor": 8}
        elif name == "TokenStream.of":
            assert TokenStream.of([], vocab=4).num_documents == 0
        else:
            link = cluster_of("h100", devices=16).link_of({"fsdp": 16}, ("fsdp",))
            assert link.name == "network"
