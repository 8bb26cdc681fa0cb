"""The planner's bytes on the wire are those of our compiled programs."""

import dataclasses

import optax
import pytest

from meshpar import audit, batch_shapes, make_train_step
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.clusters import device_of
from meshpar.planner.workload.shapes import SHAPES

BATCH, SEQ = 16, 64


def audited(preset, layout, *, first=False, devices_per_host=None):
    """Bytes that a device of the compiled step sends, by mesh axes and kind.

    With `first` without loops that may not run.
    """
    step = make_train_step(
        build(preset), optax.adam(1e-3), layout, devices_per_host=devices_per_host
    )
    found = {}
    for row in audit(step, batch_shapes(BATCH, SEQ)).rows:
        collective = row.collective
        if first and not collective.counted:
            continue
        key = (collective.mesh_axes, collective.kind)
        sent = collective.wire_bytes * collective.executions
        found[key] = found.get(key, 0) + sent
    return found


def planned(preset, layout, hosts=1):
    """The same as planned, for the CPU that the test compiles for."""
    found = {}
    device = dataclasses.replace(device_of("h100-80gb"), platform="cpu")
    cluster = Cluster(device=device, hosts=hosts, devices_per_host=8 // hosts)
    for collective in estimate(
        SHAPES[preset], cluster, layout, global_batch=BATCH, seq=SEQ
    ).collectives:
        key = (collective.mesh_axes, collective.kind)
        found[key] = found.get(key, 0) + collective.wire_bytes
    return found


# The loss and the weights of its tokens, sums of one value, are not planned.
SCALARS = 150

# Layout -> bytes that a device of its compiled step sends, as the tests below found
# them (jax 0.10.2, 2026-11-27); the compiled steps are for `make test-full`.
COMPILED = {
    ("tiny-8", "fsdp=8,remat=full"): {
        (("fsdp",), "all-gather"): 6_200_768,
        (("fsdp",), "reduce-scatter"): 3_215_296,
    },
    ("tiny-8", "fsdp=4,tensor=2,microbatches=2,fsdp_gather=microbatch"): {
        (("fsdp",), "all-gather"): 5_222_784,
        (("fsdp",), "reduce-scatter"): 2_759_424,
        (("tensor",), "all-reduce"): 2_362_368,
    },
    ("tiny-8", "data=2,stage=2,tensor=2,microbatches=4,remat=stage"): {
        (("tensor",), "all-reduce"): 4_230_144,
        (("stage",), "collective-permute"): 655_360,
        (("stage",), "all-gather"): 294_912,
        (("stage",), "reduce-scatter"): 294_912,
        (("data",), "all-reduce"): 854_016,
        (("data", "stage"), "all-reduce"): 197_388,
    },
    ("tiny-moe", "expert=8,remat=save:experts_in"): {
        (("expert",), "all-to-all"): 2_316_160,
        (("expert",), "all-gather"): 1_641_920,
        (("expert",), "reduce-scatter"): 935_872,
    },
}


@pytest.mark.parametrize(("preset", "layout"), COMPILED)
def test_bytes_by_mesh_axis_are_those_that_were_once_compiled(preset, layout):
    ours, theirs = planned(preset, layout), COMPILED[preset, layout]
    assert ours.keys() == theirs.keys()
    for key, sent in theirs.items():
        assert ours[key] == pytest.approx(sent, rel=0.01, abs=SCALARS), key


# Layouts that gather or compute a stage's layers twice have four layers a stage: XLA
# unrolls a loop over two, and does once there what the two passes have alike.


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=8,remat=full",
        "fsdp=4,tensor=2,microbatches=2,fsdp_gather=microbatch",
        "data=2,stage=2,tensor=2,microbatches=4,remat=stage",
        "data=8",
        "fsdp=8,zero=1",
        "data=2,fsdp=4,zero=2",
        "data=2,tensor=4,remat=full",
        "data=2,tensor=4,remat=save:attention_qkv",
        "data=2,tensor=4,remat=save:attention_out",
        "data=2,tensor=4,remat=dots",
        "fsdp=2,stage=4,microbatches=4",
        "data=4,stage=2,microbatches=2",
        "stage=2,fsdp=4,microbatches=4,fsdp_gather=microbatch",
        "stage=2,fsdp=2,tensor=2,microbatches=4,schedule=interleaved_1f1b,chunks=2",
        "stage=4,tensor=2,microbatches=4,remat=full",
        "stage=2,tensor=4,microbatches=4,remat=stage_full",
        "fsdp=2,stage=4,microbatches=4,schedule=zero_bubble_h1,execution=uniform",
        "data=2,stage=4,microbatches=4,schedule=zero_bubble_h2,execution=divergent",
        "stage=2,fsdp=4,microbatches=4,fsdp_gather=microbatch,schedule=zero_bubble_h1,"
        "execution=uniform",
    ],
)
def test_bytes_by_mesh_axis_are_those_of_the_compiled_step(layout):
    ours, theirs = planned("tiny-8", layout), audited("tiny-8", layout)
    for key in ours.keys() | theirs.keys():
        assert ours.get(key, 0) == pytest.approx(
            theirs.get(key, 0), rel=0.01, abs=SCALARS
        ), key


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=2,tensor=4,remat=selective,sequence_parallel=true",
        *(
            pytest.param(
                f"tensor=8,sequence_parallel=true{more}", marks=pytest.mark.slow
            )
            for more in (
                "",
                ",remat=full",
                ",remat=save:attention_out",
                ",remat=save:mlp_gate_up",
            )
        ),
        pytest.param(
            "stage=2,tensor=4,microbatches=4,remat=stage,sequence_parallel=true",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bytes_of_sequence_parallelism_are_those_of_the_compiled_step(layout):
    ours, theirs = planned("tiny-8", layout), audited("tiny-8", layout)
    for found in (ours, theirs):
        # XLA:CPU has no scattered sums of GSPMD: it sums, and takes a part.
        scattered = found.pop((("tensor",), "reduce-scatter"), 0)
        found[("tensor",), "all-reduce"] += 2 * scattered
    for key in ours.keys() | theirs.keys():
        assert ours.get(key, 0) == pytest.approx(
            theirs.get(key, 0), rel=0.02, abs=SCALARS
        ), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "expert=8,remat=save:experts_in",
        "data=2,expert=4",
        "data=2,expert=4,remat=full",
        "data=2,expert=4,remat=save:block_input",
        "expert=4,tensor=2,remat=dots",
        "expert=4,tensor=2,remat=save:experts_in",
    ],
)
def test_bytes_of_experts_are_those_of_the_compiled_step(layout):
    """Of first rounds: how many follow is a value of the data."""
    key = ("expert",), "all-to-all"
    ours = planned("tiny-moe", layout)[key]
    assert ours == pytest.approx(audited("tiny-moe", layout, first=True)[key], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "save:block_input"])
def test_bytes_of_tokens_sent_once_to_each_host_are_those_of_the_compiled_step(remat):
    layout = f"expert=8,remat={remat}"
    ours = planned("tiny-moe", layout, hosts=2)
    theirs = audited("tiny-moe", layout, first=True, devices_per_host=4)
    for kind in ("all-to-all", "collective-permute"):
        wanted = sum(sent for (_, other), sent in theirs.items() if other == kind)
        assert ours[("expert",), kind] == pytest.approx(wanted, rel=0.01), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=2,expert=4",
        "data=2,expert=4,zero=1,zero_axes=expert",
    ],
)
def test_bytes_of_what_is_shared_out_over_experts_are_those_of_the_step(layout):
    ours, theirs = planned("tiny-moe", layout), audited("tiny-moe", layout, first=True)
    for key in ours.keys() | theirs.keys():
        if key[1] in ("all-gather", "reduce-scatter"):
            assert ours.get(key, 0) == pytest.approx(
                theirs.get(key, 0), rel=0.02, abs=SCALARS
            ), key
