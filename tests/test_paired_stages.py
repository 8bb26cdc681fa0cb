"""A forward of one microbatch beside a backward of another, and what that changes."""

import functools
import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import Model, make_mesh
from meshpar.cli.main import main
from meshpar.hardware import platforms
from meshpar.model.contract import BlockGroup
from meshpar.model.inputs import default_inputs
from meshpar.parallel.expert.experts import routed_mlp
from meshpar.parallel.pipeline import paired_stages
from meshpar.schedules import SCHEDULES, tick_table
from meshpar.trace.interleaved import Call, interleaved
from meshpar.trace.walk import equations
from tests.marks import slow
from tests.pipelined import SEQ, assert_equal_to_plain, parameter
from tests.schedule_cases import ALL
from tests.test_audit_targets import needs_gpu_compiler

EMBED, HIDDEN, EXPERTS, VOCAB = 16, 24, 4, 64


@pytest.fixture
def overlapping(monkeypatch):
    """Virtual CPU devices that a step takes to hide all-to-alls; pairs it makes."""
    cpu = replace(platforms.PLATFORMS["cpu"], overlaps_all_to_alls=True)
    monkeypatch.setitem(platforms.PLATFORMS, "cpu", cpu)
    pairs = []

    def counted(*calls):
        pairs.append(calls)
        return interleaved(*calls)

    monkeypatch.setattr(paired_stages, "interleaved", counted)
    return pairs


@functools.cache
def routed_model(dense, routed):
    """A model of dense blocks, then blocks of routed experts."""

    def dense_block(params, x, scope):
        return x + jnp.tanh(jnp.cumsum(x, 1) / SEQ @ params["up"])

    def routed_block(params, x, scope):
        mixed = x + jnp.tanh(jnp.cumsum(x, 1) / SEQ @ params["mix"])
        shares = jax.nn.softmax(mixed @ params["router"])
        weight, chosen = jax.lax.top_k(shares, 2)
        kernels = params["gate_up"], params["down"]
        y = routed_mlp(mixed, chosen, weight, *kernels, scope, num_experts=EXPERTS)
        return x + y, {"square": jnp.sum(jnp.square(shares))}

    def embedded(params, batch, scope):
        return params["table"][batch["tokens"]]

    def head(params, x, batch, scope):
        targets = jax.nn.one_hot(batch["targets"], VOCAB)
        losses = -jnp.sum(targets * jax.nn.log_softmax(x @ params["table"].T), -1)
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

    square = ("embed", None)
    group = BlockGroup(
        name="routed", num_layers=routed, block=routed_block, auxiliary={"square": 0.1}
    )
    return Model(
        parameters={
            "table": parameter((VOCAB, EMBED), ("vocab", "embed")),
            "dense": {"up": parameter((EMBED, EMBED), square, dense)},
            "routed": {
                "mix": parameter((EMBED, EMBED), square, routed),
                "router": parameter((EMBED, EXPERTS), square, routed),
                "gate_up": parameter(
                    (EXPERTS, EMBED, 2, HIDDEN),
                    ("experts", "embed", None, "mlp"),
                    routed,
                ),
                "down": parameter(
                    (EXPERTS, HIDDEN, EMBED), ("experts", "mlp", "embed"), routed
                ),
            },
        },
        embed=embedded,
        groups=(
            BlockGroup(name="dense", num_layers=dense, block=dense_block),
            group,
        ),
        head=head,
        inputs=default_inputs(),
        per_token=True,
    )


@pytest.mark.parametrize(
    "line",
    [
        "stage=2,expert=2,microbatches=3",
        slow("stage=2,expert=2,fsdp=2,microbatches=3,remat=full"),
        slow("stage=4,expert=2,microbatches=6,splits=2/1/1/1"),
        slow("stage=2,expert=2,microbatches=4,schedule=dualpipe_v,chunks=2"),
        slow("stage=2,expert=2,microbatches=4,schedule=interleaved_1f1b,chunks=2"),
        slow("stage=2,expert=2,microbatches=4,schedule=zero_bubble_h1,remat=full"),
        slow("stage=2,expert=2,data=2,microbatches=3,fsdp_prefetch=on"),
    ],
)
def test_pairs_of_microbatches_train_the_model_of_one_device(line, overlapping):
    model = routed_model(1, 4 if "chunks" in line or "stage=4" in line else 2)
    assert_equal_to_plain(model, line)
    assert overlapping


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.filterwarnings("ignore:the model of blocks:UserWarning")
def test_a_tick_of_both_hides_what_experts_send(capsys):
    line = "stage=2,expert=4,microbatches=8,remat=full,precision=bf16"
    command = f"--preset qwen3-30b-a3b --model layers=4 --layout {line}"
    target = "--target gpu:h100:1x8 --global-batch 32 --seq 4096 --timeout 580"
    main(["audit", *command.split(), *target.split(), "--json"])
    report = json.loads(capsys.readouterr().out)
    sent = [
        one
        for one in report["collectives"]
        if one["kind"] == "all-to-all" and one["in_loop"] and one["counted"]
    ]
    wire_s, hidden_s = (
        sum(one["executions"] * one[key] for one in sent)
        for key in ("wire_s", "hidden_s")
    )
    # The first ticks have a forward alone, the last ones a backward.
    assert hidden_s >= 0.8 * wire_s > 0, (hidden_s, wire_s)


def there(w, x):
    """Two matmuls, and after each of them rows sent."""
    return send(send(x @ w) @ w)


def back(w, x):
    """The same the other way round."""
    return send(send(x) @ w) @ w, jnp.sum(w)


def send(x):
    return jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)


def test_each_send_stands_beside_one_matmul_of_the_other_program():
    mesh = make_mesh("expert=2", jax.devices()[:2])
    w, x = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)

    def both(w, x):
        calls = (Call(function, (w,), (x,)) for function in (there, back))
        return interleaved(*calls, lambda tree, *_: tree)

    def apart(w, x):
        return there(w, x), back(w, x)

    found, wanted = (
        jax.jit(
            jax.shard_map(
                function,
                mesh=mesh,
                in_specs=(P(), P("expert")),
                out_specs=(P("expert"), (P("expert"), P())),
                check_vma=False,
            )
        )
        for function in (both, apart)
    )
    traced = [
        one.primitive.name for one in equations(jax.make_jaxpr(found)(w, x).jaxpr)
    ]
    named = [one for one in traced if one in ("dot_general", "all_to_all")]
    order = ["dot_general", "all_to_all"] * 4
    assert named == order
    counted = [one for one in traced if one in (*order, "optimization_barrier")]
    between = [
        list(group)
        for is_barrier, group in itertools.groupby(
            counted, lambda one: one == "optimization_barrier"
        )
        if not is_barrier
    ]
    assert between == [["dot_general", "all_to_all"]] * 4
    for one, other in zip(
        jax.tree.leaves(found(w, x)), jax.tree.leaves(wanted(w, x)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pairs_take_no_more_forwards_and_backwards_and_hold_one_more(name):
    schedule = next(one for one in ALL[::-1] if one.name == name)
    alone, paired = (tick_table(schedule, paired=one) for one in (False, True))
    assert paired.num_forward_ticks == alone.num_forward_ticks
    assert heads(paired, schedule) <= heads(alone, schedule)
    for one, other in zip(paired.peak_in_flight, alone.peak_in_flight, strict=True):
        assert other <= one <= other + 1
    last = schedule.num_stages - 1
    for tick in range(paired.num_ticks):
        at_last = paired.forward_stage[tick] == last
        forward = set(paired.forward_microbatch[tick][at_last])
        at_last = paired.backward_stage[tick] == last
        assert not forward & set(paired.backward_microbatch[tick][at_last])


def heads(table, schedule):
    """Ticks of the phases in which a forward ends: all of them compute the head."""
    at_last = (table.forward_stage == schedule.num_stages - 1).any(axis=1)
    return sum(
        phase.stop - phase.start
        for phase in table.phases
        if phase.has_forward and at_last[phase.start : phase.stop].any()
    )
