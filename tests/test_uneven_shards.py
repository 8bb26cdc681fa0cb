"""Uneven parts of `data`: the training of one device, whatever runs on which part."""

from dataclasses import replace

import jax
import optax
import pytest
from jax import lax

from meshpar import Layout, audit
from meshpar.layout.requirements import layout_errors
from tests.marks import slow
from tests.pipelined import (
    assert_close,
    assert_equal_to_plain,
    batch_of,
    mlp_of,
    model_of,
    plain_logits,
    state_of,
    step_of,
)

UNEVEN = "data=2,microbatches=3,data_splits=5/1"


@pytest.mark.parametrize(
    "line",
    [
        UNEVEN,
        "data=3,microbatches=2,data_splits=3/1/2,zero=1",
        "data=4,fsdp=2,microbatches=3,data_splits=2/4,fsdp_gather=microbatch",
        slow("data=2,fsdp=2,microbatches=2,data_splits=1/3,zero=2"),
        slow("data=2,tensor=2,microbatches=3,data_splits=1/5"),
        slow(
            "data=2,fsdp=2,tensor=2,microbatches=2,data_splits=3/1,fsdp_gather=microbatch"
        ),
        slow("data=4,fsdp=2,microbatches=3,data_splits=1/7/2/2,remat=full"),
    ],
)
def test_uneven_parts_have_the_gradients_of_one_device(line):
    assert_equal_to_plain(mlp_of(2, dropout=0.2), line)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_uneven_parts_of_a_language_model_have_the_gradients_of_one_device(dropout):
    line = "data=2,fsdp=2,microbatches=3,data_splits=4/2,remat=full"
    assert_equal_to_plain(model_of(2, dropout), line)


def test_three_steps_and_what_is_read_between_them_are_those_of_one_device():
    model, batch, found = mlp_of(2, dropout=0.2), batch_of(), []
    for line in (UNEVEN, "data=1"):
        step = step_of(model, line, optax.adamw(1e-3))
        state = state_of(step, model)
        read = step.evaluate(state, batch)["loss"], step.logits(state, batch["tokens"])
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        tree = read, losses, step.in_layer_order(state.params)
        found.append(jax.device_get(tree))
    assert_close(*found)
    assert_close(found[0][0][1], plain_logits(model))


def test_what_crosses_data_crosses_it_once_a_step():
    step = step_of(
        mlp_of(2), "data=2,fsdp=2,microbatches=3,data_splits=5/1,fsdp_gather=microbatch"
    )
    report = audit(step, batch_of())
    rows = [row.collective for row in report.rows]
    over_data = [row for row in rows if "data" in row.mesh_axes]
    assert {row.kind for row in over_data} == {"all-gather", "all-reduce"}
    assert not any(row.in_loop for row in over_data) and not report.surprises
    # Of a loop that some parts leave earlier the most are counted.
    times = {row.executions for row in rows if row.in_branch}
    assert times and all(number % 5 == 0 for number in times)


def test_a_block_that_communicates_over_data_is_refused(refuses):
    model = mlp_of(2)
    (group,) = model.groups

    def block(params, x, scope):
        if scope.batch_axes:
            x = x - lax.pmean(x, scope.batch_axes)
        return group.block(params, x, scope)

    model = replace(model, groups=(replace(group, block=block),))
    step = step_of(model, UNEVEN)
    with refuses("step.shards_communicate", "'data'"):
        step.loss_and_gradients(state_of(step, model), batch_of())


@pytest.mark.parametrize(
    ("line", "key", "named"),
    [
        ("microbatches=2,data_splits=3/1", "option_without_axis", "data=1"),
        ("data=3,microbatches=2,data_splits=3/1", "wrong_data_splits", "data=3"),
        (
            "data=2,microbatches=2,data_splits=2/1",
            "wrong_data_splits",
            "microbatches=2",
        ),
        (f"{UNEVEN},stage=2", "needs_even_shards", "stage=2"),
        (f"{UNEVEN},context=2", "needs_even_shards", "context=2"),
        (f"{UNEVEN},expert=2", "needs_even_shards", "expert=2"),
        (f"{UNEVEN},zero=2", "needs_even_shards", "zero=2"),
        (f"{UNEVEN},zero_axes=data", "needs_even_shards", "zero=3"),
        (f"{UNEVEN},fsdp_prefetch=on", "needs_even_shards", "fsdp_prefetch=on"),
        (f"{UNEVEN},sync_every=2", "needs_even_shards", "sync_every=2"),
    ],
)
def test_layouts_whose_parts_must_run_as_often_are_refused(line, key, named, refuses):
    (error,) = [
        error
        for error in layout_errors(Layout.parse(line)).values()
        if error.key == f"layout.{key}"
    ]
    with refuses(f"layout.{key}", named):
        raise error
