"""Three levels of links: in a host, in a rack, and between racks or sites."""

from dataclasses import replace

import pytest

from meshpar.hardware.devices import DEVICES
from meshpar.layout import Layout
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.clusters import cluster_of, load_device
from meshpar.planner.machine.collective_cost import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    send_s,
)
from meshpar.planner.machine.execution import EXECUTIONS
from meshpar.planner.search.search import Request, search
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import SHAPES

COSTS = (all_gather_s, all_reduce_s, all_to_all_s)
PORT = 50e9 * 0.9  # of an H100's network, as achieved


def racked_cluster(devices: int, **changes) -> Cluster:
    """Return 64 H100s in hosts of eight, so many of them to a rack."""
    device = replace(DEVICES["h100-80gb"], rack_devices=devices, **changes)
    return Cluster(device=device, hosts=8)


@pytest.mark.parametrize("payload", [1e3, 1e6, 1e9])
def test_what_stays_in_a_rack_takes_as_long_as_without_racks(payload):
    layout = Layout(data=4, fsdp=2, tensor=8)
    plain, racks = (
        racked_cluster(0),
        racked_cluster(16, oversubscription=8.0, rack_hop_s=1e-3),
    )
    for axes in (("fsdp",), ("tensor",), ("fsdp", "tensor")):
        links = [each.link(layout, *axes) for each in (plain, racks)]
        assert links[0] == links[1]
    whole = racked_cluster(64, oversubscription=8.0).link(
        layout, "data", "fsdp", "tensor"
    )
    assert whole == plain.link(layout, "data", "fsdp", "tensor")
    slower = racks.link(layout, "data")
    for cost in COSTS:
        assert cost(payload, 4, slower) > cost(payload, 4, plain.link(layout, "data"))


@pytest.mark.parametrize("axes, in_rack", [(("data",), 1), (("data", "tensor"), 8)])
def test_between_racks_bytes_take_the_share_that_leaves_a_rack(axes, in_rack):
    """Every member of a rack has its part of the way out."""
    layout = Layout(data=4, fsdp=2, tensor=8)
    link = racked_cluster(16, oversubscription=4.0).link(layout, *axes)
    members = 4 * in_rack
    assert (link.racks, link.rack is not None) == (4, True)
    out = PORT / 4
    # The first level sends out of the rack what the ring does, and nothing is faster.
    sent = 8e9 * (members - 1) / members / (out * in_rack)
    assert all_gather_s(8e9, members, link) <= sent + 1e-3
    assert all_gather_s(8e9, members, link) >= 8e9 * 3 / 4 / (out * in_rack)
    assert all_to_all_s(8e9, members, link) == pytest.approx(8e9 * 0.75 / out, rel=1e-3)
    # One of them sends to the next rack, with what leads out for all.
    rate = min(PORT, out * in_rack)
    assert send_s(8e9, link) == pytest.approx(8e9 / rate, rel=1e-3)


def test_small_sums_go_through_the_racks_in_levels():
    """Few of the 64 steps of a ring leave a rack, but each of those is slow."""
    layout, hop_s = Layout(data=64), 1e-3
    link = racked_cluster(16, rack_hop_s=hop_s).link(layout, "data")
    for cost, trips in ((all_gather_s, 1), (all_reduce_s, 2)):
        found_s = cost(1.0, 64, link)
        assert found_s <= trips * 3 * hop_s + 1e-3
        assert found_s >= trips * 2 * hop_s
    # A rack more, a step more.
    more = racked_cluster(8, rack_hop_s=hop_s).link(layout, "data")
    assert all_gather_s(1.0, 64, more) > all_gather_s(1.0, 64, link) + 3 * hop_s


def test_without_oversubscription_racks_change_nothing_but_latency():
    layout = Layout(data=4, fsdp=2, tensor=8)
    plain, racks = (racked_cluster(n).link(layout, "data", "fsdp") for n in (0, 16))
    for cost in COSTS:
        there_s, here_s = cost(1e9, 8, racks), cost(1e9, 8, plain)
        assert there_s == pytest.approx(here_s, rel=0.01)


def test_a_slice_of_a_torus_is_a_level_below_racks():
    device = replace(DEVICES["tpu-v5e"], rack_devices=128, oversubscription=10.0)
    cluster = Cluster(device=device, hosts=4, torus=(8, 8))
    near, far = (Layout(data=2, fsdp=128), Layout(data=4, fsdp=64))
    link = cluster.link(far, "data")
    assert link.racks == 2 and link.rack is not None
    assert cluster.link(near, "fsdp").rack is None
    assert cluster.link(far, "fsdp").name == "torus"


def test_a_rack_has_whole_hosts():
    layout = Layout(data=8, tensor=8)
    for devices, racks in ((3, 8), (8, 8), (17, 4), (64, 1), (1000, 1)):
        link = racked_cluster(devices, oversubscription=2.0).link(layout, "data")
        assert (link.racks, link.rack is None) == (racks, racks == 1)


def test_a_plan_keeps_weights_in_a_site():
    """Between two sites a hundred times slower only `data` or `stage` crosses."""
    workload = SHAPES["llama3-8b"]
    device = replace(DEVICES["h100-80gb"], rack_devices=8, oversubscription=100.0)
    request = Request(
        workload=workload,
        cluster=Cluster(device=device, hosts=2),
        global_batch=64,
        constraints=Constraints.parse(keep=["remat=full", "context=1"]),
    )
    best = search(request).plans[0].run
    assert not any(
        best.link(axis).rack
        for axis in ("tensor", "fsdp")
        if getattr(best.layout, axis) > 1
    )


def test_copies_to_the_host_wait_for_collectives_on_the_same_pcie():
    """Copies and collectives on one link hide behind matmuls one after another."""
    words = "fsdp=2,tensor=4,zero=1,sequence_parallel=true,precision=bf16"
    words += ",remat=offload:attention_qkv/mlp_gate_up"
    costs = []
    for shares in (False, True):
        device = replace(
            DEVICES["h100-80gb"], shares_host_link=shares, host_bytes_per_s=20e9
        )
        run = estimate(
            SHAPES["llama3-8b"],
            Cluster(device=device),
            words,
            global_batch=8,
            seq=8192,
            execution=EXECUTIONS["megatron-bridge"],
        ).run
        costs.append(block_time(run, moe=False).forward)
    apart, shared = costs
    assert apart.exposed_s["host"] > 0 and apart.hidden_s > 0
    waits = shared.exposed_s["host"] - apart.exposed_s["host"]
    assert waits == pytest.approx(apart.hidden_s)


def test_a_file_describes_racks(tmp_path):
    path = tmp_path / "cards.toml"
    path.write_text(
        'like = "a100-40gb"\nlink_bytes_per_s = 25e9\nnetwork_bytes_per_s = 0.39e9\n'
        "rack_devices = 64\noversubscription = 4\nrack_hop_s = 50e-6\n"
        "shares_host_link = true\n"
    )
    device = load_device(path)
    assert (device.rack_devices, device.oversubscription) == (64, 4)
    link = cluster_of(str(path), devices=128).link(Layout(data=16, fsdp=8), "data")
    assert (link.racks, link.rack_hop_s) == (2, 50e-6)
    assert link.rack_bytes_per_s == pytest.approx(0.39e9 * 0.9 / 4)


@pytest.mark.parametrize(
    "content, refusal",
    [
        ("rack_devices = -8", ("hardware.not_whole_number", "rack_devices=-8", 0)),
        ("oversubscription = 0.5", ("hardware.implausible_number", 0.5, 1)),
        ('oversubscription = "4:1"', ("hardware.not_a_number", "'4:1'")),
        ("rack_hop_s = 20", ("hardware.implausible_number", "rack_hop_s=20")),
        ("shares_host_link = 1", ("hardware.not_true_or_false", "true or false")),
    ],
)
def test_racks_that_cannot_be_are_refused(tmp_path, content, refusal, refuses):
    path = tmp_path / "mine.toml"
    path.write_text(f'like = "a100-40gb"\n{content}')
    with refuses(*refusal):
        load_device(path)
