"""PipeDream with stashed weights trains as delayed gradients by hand do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Model, Parameter, make_mesh, pipeline_value_and_grad
from meshpar.cli.audit import adamw_step
from meshpar.cli.main import main
from meshpar.model.contract import BlockGroup
from meshpar.model.inputs import default_inputs
from meshpar.schedules import (
    WeightVersions,
    make_schedule,
    plan_refusal,
    tick_table,
)
from tests.marks import slow
from tests.pipelined import assert_close, batch_of, mlp_of, step_of

EMBED, HIDDEN, VOCAB, SEQ = 16, 32, 64, 16
STEPS, MICROBATCHES = 10, 6
LINE = f"microbatches={MICROBATCHES},schedule=pipedream_stash"
# The usual epsilon of 1e-8 makes steps of rounding errors where gradients are nearly 0.
ADAM = optax.adamw(optax.exponential_decay(3e-2, 7, 0.9), eps=1e-3)


def draw(seed, *shape):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape)


def block(params, x, scope=None):
    before = jnp.cumsum(x, 1) / SEQ
    return x + jnp.tanh(before @ params["up"]) @ params["down"]


def head(params, x, batch, scope=None):
    scores = jax.nn.log_softmax(jnp.tanh(x * params["scale"]) @ params["out"])
    losses = -jnp.sum(jax.nn.one_hot(batch["targets"], VOCAB) * scores, -1)
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


@functools.cache
def mlp_model(layers):
    """A model whose ends have parameters of their own."""

    def parameter(seed, shape, axes, num_layers=None):
        return Parameter(
            shape=shape,
            dtype=jnp.float32,
            logical_axes=axes,
            initial=lambda key: 0.3 * jax.random.normal(key, shape),
            num_layers=num_layers,
        )

    return Model(
        parameters={
            "table": parameter(0, (VOCAB, EMBED), ("vocab", "embed")),
            "shift": parameter(1, (EMBED,), ("embed",)),
            "blocks": {
                "up": parameter(2, (EMBED, HIDDEN), ("embed", "mlp"), layers),
                "down": parameter(3, (HIDDEN, EMBED), ("mlp", "embed"), layers),
            },
            "scale": parameter(4, (EMBED,), ("embed",)),
            "out": parameter(5, (EMBED, VOCAB), ("embed", "vocab")),
        },
        embed=lambda params, batch, scope: jnp.tanh(
            params["table"][batch["tokens"]] + params["shift"]
        ),
        groups=(BlockGroup(name="blocks", num_layers=layers, block=block),),
        head=head,
        inputs=default_inputs(),
        per_token=True,
    )


def batch_at(number):
    """Another batch for each step; about half of its tokens count.

    Of one step no token of the first microbatch does.
    """
    batch = {
        name: np.roll(array, 5 * number, axis=0) for name, array in batch_of().items()
    }
    if number == 4:
        batch["weights"][: len(batch["weights"]) // MICROBATCHES] = 0
    return batch


# By hand: one device, each stage's weights a list of versions.

FIRST, LAST = ("table", "shift"), ("scale", "out")


def stages_of(params, sizes):
    """The weights of every stage: its layers, and its end's."""
    bounds = np.cumsum([0, *sizes])
    stages = []
    for stage, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        ends = FIRST * (stage == 0) + LAST * (stage == len(sizes) - 1)
        own = {name: value[start:stop] for name, value in params["blocks"].items()}
        stages.append({"blocks": own, **{name: params[name] for name in ends}})
    return stages


@jax.jit
def loss_by_hand(stages, batch):
    x = jnp.tanh(stages[0]["table"][batch["tokens"]] + stages[0]["shift"])
    for stage in stages:
        for layer in range(len(stage["blocks"]["up"])):
            x = block(
                {name: value[layer] for name, value in stage["blocks"].items()}, x
            )
    return head(stages[-1], x, batch)


@jax.jit
def gradient_by_hand(stages, batch):
    def mean(stages):
        total, weight = loss_by_hand(stages, batch)
        return total / jnp.maximum(weight, 1e-9), (total, weight)

    return jax.value_and_grad(mean, has_aux=True)(stages)


@functools.partial(jax.jit, static_argnums=0)
def update_by_hand(optimizer, weights, state, gradient):
    updates, state = optimizer.update(gradient, state, weights)
    return optax.apply_updates(weights, updates), state


def by_hand(params, sizes, optimizer, num_steps, num_parts=MICROBATCHES, shards=1):
    """Losses and last parameters of delayed gradients with stashed weights."""
    newest, num_stages = stages_of(params, sizes), len(sizes)
    states, losses = [optimizer.init(weights) for weights in newest], []
    for number in range(num_steps):
        versions, sums = [[weights] for weights in newest], []
        for at in range(num_parts):
            part = {
                name: jnp.concatenate(
                    [np.split(rows, num_parts)[at] for rows in np.split(array, shards)]
                )
                for name, array in batch_at(number).items()
            }
            used = [
                versions[stage][max(0, at - (num_stages - 1 - stage))]
                for stage in range(num_stages)
            ]
            (_, found), gradients = gradient_by_hand(used, part)
            sums.append(found)
            for stage in range(num_stages):
                if found[1] == 0:  # No update, as no step changes anything then.
                    versions[stage].append(versions[stage][-1])
                    continue
                weights, states[stage] = update_by_hand(
                    optimizer, versions[stage][-1], states[stage], gradients[stage]
                )
                versions[stage].append(weights)
        newest = [versions[stage][-1] for stage in range(num_stages)]
        losses.append(sum(total for total, _ in sums) / sum(w for _, w in sums))
    return losses, newest


def trained(step, num_steps):
    state, losses = step.init(seed=3), []
    for number in range(num_steps):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
        assert np.isfinite(metrics["grad_norm"]) and metrics["skipped"] == 0
    return losses, state


@functools.cache
def step_with(layers, line, optimizer=ADAM):
    return step_of(mlp_model(layers), f"{line},{LINE}", optimizer)


def assert_trains_as_by_hand(sizes, line, optimizer=ADAM, shards=1):
    step = step_with(sum(sizes), line, optimizer)
    params = step.in_layer_order(step.init(seed=3).params)
    wanted_losses, wanted = by_hand(params, sizes, optimizer, STEPS, shards=shards)
    losses, state = trained(step, STEPS)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    found = stages_of(step.in_layer_order(state.params), sizes)
    assert_close(found, jax.device_get(wanted))


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((2, 2), "stage=2"),
        slow((1, 1, 1, 1), "stage=4"),
        slow((2, 1, 1, 1), "stage=4,remat=full"),
    ],
)
def test_ten_steps_are_those_of_delayed_gradients_with_stashed_weights(sizes, line):
    assert_trains_as_by_hand(sizes, line)


@pytest.mark.slow
def test_replicas_of_a_stage_update_it_by_their_summed_gradients():
    assert_trains_as_by_hand((2, 1), "data=2,stage=2", shards=2)


def test_a_gradient_that_is_not_finite_leaves_the_whole_step_out():
    step = step_with(4, "stage=2")
    state = step.init(seed=3)
    before = jax.device_get((state.params, state.opt_state))
    batch = batch_at(0)
    batch["weights"][-1, 0] = np.inf
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["loss"])
    after = jax.device_get((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 6), (4, 9), (5, 2)])
def test_each_stage_keeps_and_uses_the_versions_that_were_published(
    ranks, microbatches
):
    schedule = make_schedule("pipedream_stash", ranks, microbatches)
    versions = WeightVersions(schedule, tick_table(schedule, divergent=True))
    for rank, (used, kept) in enumerate(zip(versions.used, versions.kept, strict=True)):
        late = ranks - 1 - rank
        assert used == tuple(max(0, at - late) for at in range(microbatches))
        assert kept == min(ranks - rank, microbatches)
    held = [{} for _ in range(ranks)]
    for tick, (read, written) in enumerate(
        zip(versions.read, versions.written, strict=True)
    ):
        for rank in range(ranks):
            forward = schedule_at(versions.table.forward_microbatch, tick, rank)
            backward = schedule_at(versions.table.backward_microbatch, tick, rank)
            at = forward if backward is None else backward
            if at is not None:
                now = held[rank].get(int(read[rank]), 0)
                assert now == versions.used[rank][at]
            if backward is not None:
                held[rank][int(written[rank])] = backward + 1
    assert {slots[versions.last] for slots in held} == {microbatches}


def schedule_at(table, tick, rank):
    return None if table[tick, rank] < 0 else int(table[tick, rank])


ONE = "stage=2,microbatches=2,schedule=pipedream_stash"


@pytest.mark.parametrize(
    ("line", "key", "named"),
    [
        (f"{ONE},execution=uniform", "stash_in_lock_step", "execution=uniform"),
        (f"{ONE},fsdp=2", "needs_one_update", "fsdp=2"),
        (f"{ONE},data=2,zero=1", "needs_one_update", "zero=1"),
        (f"{ONE},data=2,zero_axes=data", "needs_one_update", "zero=3"),
        (f"{ONE},tensor=2", "needs_one_update", "tensor=2"),
        (
            f"{ONE},context=2,attention=allgather",
            "needs_one_update",
            "context=2",
        ),
        (f"{ONE},expert=2", "needs_one_update", "expert=2"),
        (f"{ONE},optimizer_memory=host", "needs_one_update", "optimizer_memory=host"),
        (
            f"{ONE},precision=bf16,param_dtype=bf16",
            "needs_one_update",
            "param_dtype=bf16",
        ),
        (f"{ONE},data=2,sync_every=4", "needs_one_update", "sync_every=4"),
        (f"{ONE},data=2,fsdp_prefetch=on", "needs_one_update", "fsdp_prefetch=on"),
    ],
)
def test_a_layout_that_needs_one_update_a_batch_is_refused(line, key, named, refuses):
    with refuses(f"layout.{key}", named):
        step_of(mlp_model(4), line)


@pytest.mark.parametrize(
    ("options", "key", "named"),
    [
        ({"max_grad_norm": 1.0}, "step.needs_one_update", "max_grad_norm=1.0"),
        ({"unroll_optimizer": True}, "step.needs_one_update", "unroll_optimizer=True"),
        (
            {"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))},
            "optimizer.needs_one_update",
            "adds up",
        ),
        (
            {
                "optimizer": optax.chain(
                    optax.sgd(1.0), optax.contrib.reduce_on_plateau()
                )
            },
            "optimizer.needs_one_update",
            "the loss",
        ),
    ],
)
def test_an_option_that_needs_all_gradients_at_once_is_refused(
    options, key, named, refuses
):
    with refuses(key, named):
        step_of(mlp_model(4), ONE, **options)


def test_a_parameter_of_both_ends_is_refused(refuses):
    with refuses("model.parameter_of_two_stages", "table"):
        step_of(mlp_of(4), ONE)


def test_the_command_says_that_the_update_is_another_one(capsys):
    sizes = ["--stages", "3", "--microbatches", "6"]
    assert main(["schedule", "--schedule", "pipedream_stash", *sizes]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "changes what is trained" in last and last.endswith("3 2 1")


def test_an_audit_compiles_it_without_clipping_and_notes_the_other_update():
    step = adamw_step(mlp_model(4), ONE, devices=jax.devices()[:2])
    assert step.options.max_grad_norm is None
    assert any(
        "changes the update" in note for note in step.audit_subject(batch_of()).notes
    )


def test_a_plan_and_the_pipeline_alone_refuse_it(refuses):
    with refuses("schedule.changes_the_update", "pipedream_stash"):
        raise plan_refusal("pipedream_stash")
    with refuses("schedule.changes_the_update", "pipedream_stash"):
        pipeline_value_and_grad(
            lambda w, x: x @ w,
            lambda scale, x, y: jnp.mean(scale * x - y),
            mesh=make_mesh("stage=2", devices=jax.devices()[:2]),
            num_microbatches=2,
            schedule="pipedream_stash",
        )
