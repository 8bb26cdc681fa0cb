"""Gradients summed inside each host, then across, are what one sum makes them."""

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from meshpar import Layout, make_mesh, make_train_step
from meshpar.audit.report import audit
from meshpar.parallel.reduction import host_groups, sum_by_host
from tests.conftest import rows
from tests.marks import slow
from tests.multiprocess.test_train import train
from tests.pipelined import QUICK, batch_of, mlp_of

MODEL = mlp_of(2)


def hosts_in(layout, per_host):
    """The host of each device of a mesh in meshpar's order."""
    sizes = list(Layout.parse(layout).mesh_shape.values())
    return (np.arange(np.prod(sizes)) // per_host).reshape(sizes)


@pytest.mark.parametrize(
    ("layout", "per_host", "axes", "inside", "across"),
    [
        ("data=4", 2, ["data"], ((0, 1), (2, 3)), ((0, 2), (1, 3))),
        ("data=4,tensor=2", 4, ["data"], ((0, 1), (2, 3)), ((0, 2), (1, 3))),
        (
            "data=2,fsdp=4",
            4,
            ["data", "fsdp"],
            ((0, 1, 2, 3), (4, 5, 6, 7)),
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        ("data=2,fsdp=4", 2, ["fsdp"], ((0, 1), (2, 3)), ((0, 2), (1, 3))),
    ],
)
def test_the_groups_are_of_each_host_and_of_one_device_of_each(
    layout, per_host, axes, inside, across
):
    found = host_groups(hosts_in(layout, per_host), axes)
    assert (found.inside, found.across) == (inside, across)


@pytest.mark.parametrize(
    ("layout", "per_host", "axes"),
    [
        ("data=4", 4, ["data"]),  # inside one host
        ("data=2,tensor=4", 4, ["data"]),  # one device of each
        ("data=6", 4, ["data"]),  # 4 of one and 2 of the other
        ("data=2,fsdp=3", 2, ["fsdp"]),  # cut otherwise from group to group
    ],
)
def test_other_sums_are_one_collective(layout, per_host, axes):
    assert host_groups(hosts_in(layout, per_host), axes) is None


@pytest.mark.parametrize("axes", [("data",), ("data", "fsdp")])
def test_the_sums_are_those_of_one_collective(axes):
    layout = "data=4,fsdp=2" if len(axes) == 2 else "data=4,tensor=2"
    mesh, hosts = make_mesh(layout), hosts_in(layout, 4)
    random = np.random.default_rng(0)
    # Whole numbers, so that every order of adding gives the same; 19 do not divide.
    arrays = [
        random.integers(-9, 9, (8, 3, 5)).astype(np.float32),
        random.integers(-9, 9, (8, 2)).astype(np.int32),
        random.integers(-9, 9, (8, 4)).astype(np.float32),
    ]

    def both(*arrays):
        by_host = sum_by_host(hosts, list(arrays), axes)
        return by_host, lax.psum(list(arrays), axes)

    spec = PartitionSpec(("data", "fsdp", "tensor"))
    summed = jax.shard_map(
        both, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    for found, wanted in zip(*jax.jit(summed)(*arrays), strict=True):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)


@pytest.fixture
def two_hosts(monkeypatch):
    """The eight devices as two hosts."""

    def mesh_hosts(mesh):
        return tuple(device.id // 4 for device in mesh.devices.flat)

    monkeypatch.setattr("meshpar.train.step_programs.mesh_hosts", mesh_hosts)
    monkeypatch.setattr("meshpar.train.refusals.mesh_hosts", mesh_hosts)


def step_of(line, **options):
    return make_train_step(
        MODEL, optax.sgd(1.0), line, compiler_options=QUICK, **options
    )


@pytest.mark.parametrize("line", ["data=8", slow("data=4,stage=2,microbatches=2")])
def test_a_step_by_host_has_the_gradients_of_a_flat_one(line, two_hosts):
    batch = batch_of()
    flat, by_host = step_of(line), step_of(line, gradient_reduction="by_host")
    state = flat.init(seed=0)
    found = [step.loss_and_gradients(state, batch) for step in (by_host, flat)]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_hosts_devices_send_a_share_each_across(two_hosts):
    step = step_of("data=8", gradient_reduction="by_host")
    report = audit(step.gradient_program, batch_of())
    assert not report.surprises
    reasons = {
        "reduce-scatter": "gradients summed inside a host, a share each",
        "all-reduce": "gradient reduction over the batch axes",
        "all-gather": "summed gradients, of the host's shares",
    }
    values = -(-MODEL.num_parameters // 4) * 4
    payloads = {
        "all-reduce": values,
        "reduce-scatter": 4 * values,
        "all-gather": 4 * values,
    }
    for kind, reason in reasons.items():
        (row,) = [row for row in report.rows if row.reason == reason]
        assert row.collective.kind == kind
        assert row.collective.payload_bytes == payloads[kind]


def test_by_host_is_refused_where_it_changes_nothing(refuses, two_hosts):
    with refuses("step.unknown_gradient_reduction", "'fast'", "'flat'", "'by_host'"):
        step_of("data=8", gradient_reduction="fast")
    with refuses("step.by_host_without_effect", "hosts: 2"):
        step_of("data=2,tensor=4", gradient_reduction="by_host")
    with refuses("step.by_host_without_effect"):  # Each by itself.
        step_of("data=8,sync_every=2", gradient_reduction="by_host")


def test_hosts_must_hold_equally_many_devices(refuses):
    with refuses("mesh.uneven_hosts", 3, 8):
        step_of("data=8", devices_per_host=3)
    with refuses("value.below_one", "devices_per_host=0"):
        step_of("data=8", devices_per_host=0)


def test_by_host_is_refused_in_one_process(refuses):
    with refuses("step.by_host_without_effect", "hosts: 1"):
        step_of("data=8", gradient_reduction="by_host")


@pytest.mark.slow
def test_two_processes_that_sum_by_host_have_the_losses_of_those_that_do_not(
    small_text, tmp_path
):
    losses = []
    for how in ("flat", "by_host"):
        options = ["--layout", "data=8", "--steps", "3", "--text", str(small_text)]
        train(2, 4, *options, "--out", str(tmp_path / how), "--gradient-reduction", how)
        losses.append(rows(tmp_path / how / "metrics.jsonl", "loss"))
    np.testing.assert_allclose(*losses, rtol=1e-5)
