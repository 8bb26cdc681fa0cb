"""Local steps train as replicas by hand do, and send nothing between averages."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, Model, Parameter, lint, make_train_step
from meshpar.audit.report import audit
from meshpar.model.contract import BlockGroup
from meshpar.models.moe import MoEConfig, moe
from meshpar.models.presets import build
from meshpar.rules.presets import DATA_PARALLEL
from meshpar.testing.batches import random_batch
from meshpar.testing.equivalence import quick_compile_options
from meshpar.train.checkpoint import CheckpointError, Checkpoints
from meshpar.train.local_steps import common_state, nesterov
from tests.marks import slow
from tests.states import zeros_of

EMBED, MLP, VOCAB, LAYERS = 16, 32, 32, 3
BATCH, SEQ, REPLICAS, EVERY = 8, 4, 2, 2
MAX_NORM = 0.5
QUICK = quick_compile_options("cpu")
# The usual epsilon of 1e-8 makes steps of rounding errors where gradients are nearly 0.
INNER = optax.adamw(1e-2, eps=1e-3)


def block(params, x, scope):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def head(params, x, batch, scope):
    logits = jax.nn.log_softmax(x @ params["table"].T)
    picked = jnp.sum(jax.nn.one_hot(batch["targets"], VOCAB) * logits, -1)
    return -jnp.sum(picked * batch["weights"]), jnp.sum(batch["weights"])


def parameter(shape, axes, num_layers=None):
    return Parameter(
        shape=shape,
        dtype=jnp.float32,
        logical_axes=axes,
        initial=lambda key: 0.3 * jax.random.normal(key, shape),
        num_layers=num_layers,
    )


MODEL = Model(
    parameters={
        "table": parameter((VOCAB, EMBED), ("vocab", "embed")),
        "blocks": {
            "up": parameter((EMBED, MLP), ("embed", "mlp"), LAYERS),
            "down": parameter((MLP, EMBED), ("mlp", "embed"), LAYERS),
        },
    },
    embed=lambda params, batch, scope: params["table"][batch["tokens"]],
    groups=(BlockGroup(name="blocks", num_layers=LAYERS, block=block),),
    head=head,
    per_token=True,
)


@functools.cache
def batch_of(number):
    """Random tokens; the replicas' shares have other sums of weights."""
    random = np.random.default_rng(number)
    tokens = random.integers(0, VOCAB, (BATCH, SEQ + 1), np.int32)
    weights = (random.random((BATCH, SEQ)) < 0.7).astype(np.float32)
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)


@jax.jit
def loss_by_hand(params, batch):
    """The model's mean loss, written out."""
    x = params["table"][batch["tokens"]]
    for layer in range(LAYERS):
        up, down = params["blocks"]["up"][layer], params["blocks"]["down"][layer]
        x = x + jnp.tanh(x @ up) @ down
    scores = x @ params["table"].T
    of_target = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
    each = jax.scipy.special.logsumexp(scores, axis=-1) - of_target
    return jnp.sum(each * batch["weights"]) / jnp.sum(batch["weights"])


@jax.jit
def step_by_hand(params, state, batch):
    loss, gradients = jax.value_and_grad(loss_by_hand)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, MAX_NORM / norm)
    gradients = jax.tree.map(lambda x: x * scale, gradients)
    updates, state = INNER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@functools.cache
def by_hand(num_steps, outer=nesterov()):  # noqa: B008
    """Common parameters and mean losses of replicas that one process trains."""
    common = first_parameters()
    outer_state = outer.init(common)
    replicas = [(common, INNER.init(common)) for _ in range(REPLICAS)]
    losses = []
    for number in range(num_steps):
        found, share = [], BATCH // REPLICAS
        for at, (params, state) in enumerate(replicas):
            rows = slice(at * share, (at + 1) * share)
            own = {name: array[rows] for name, array in batch_of(number).items()}
            found.append(step_by_hand(params, state, own))
        replicas = [(params, state) for params, state, _ in found]
        weights = batch_of(number)["weights"].reshape(REPLICAS, -1).sum(-1)
        losses.append(np.average([loss for *_, loss in found], weights=weights))
        if (number + 1) % EVERY == 0:
            of_all = [params for params, _ in replicas]
            outer_gradient = jax.tree.map(
                lambda old, *new: old - sum(new) / REPLICAS, common, *of_all
            )
            updates, outer_state = outer.update(outer_gradient, outer_state, common)
            common = optax.apply_updates(common, updates)
            replicas = [(common, state) for _, state in replicas]
    return common, losses


@functools.cache
def step_of(line, **options):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    options = {"max_grad_norm": MAX_NORM, "compiler_options": QUICK, **options}
    options.setdefault("check", line == FAST)
    optimizer = options.pop("optimizer", INNER)
    return make_train_step(MODEL, optimizer, layout, devices=devices, **options)


@functools.cache
def first_parameters():
    step = step_of(FAST)
    return step.in_layer_order(step.parameters(step.init(seed=0)))


def trained(step, state, first, last):
    losses = []
    for number in range(first, last):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_close(found, wanted):
    for (path, one), other in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=str(path))


FAST = "data=2,fsdp=2,tensor=2,sync_every=2"
PIPELINED = "data=2,stage=2,microbatches=2,sync_every=2"
LINES = [FAST, slow("data=2,sync_every=2"), slow(PIPELINED)]


@pytest.mark.parametrize("line", LINES)
def test_replicas_train_as_by_hand_and_average_after_every_interval(line):
    step = step_of(line)
    state, losses = trained(step, step.init(seed=0), 0, 3 * EVERY)
    wanted, wanted_losses = by_hand(3 * EVERY)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_close(step.in_layer_order(step.parameters(state)), wanted)
    # They all go on from there.
    for array in jax.tree.leaves(state.params):
        assert np.array_equal(*np.asarray(array))


@pytest.mark.parametrize("line", LINES)
def test_nothing_crosses_data_but_the_parameters_once_an_interval(line):
    step = step_of(line)
    report = audit(step, batch_of(0))
    rows = [row.collective for row in report.rows]
    assert not [row for row in rows if row.mesh_axes is None or "data" in row.mesh_axes]
    (row,) = [
        row
        for row in audit(step.sync_program, batch_of(0)).rows
        if "data" in row.collective.mesh_axes
    ]
    assert row.reason == "outer gradient, averaged over the replicas"
    found, layout = row.collective, step.layout
    assert found.kind == "all-reduce" and found.mesh_axes == ("data",)
    assert found.executions == 1
    split = layout.fsdp * layout.tensor
    blocks = 2 * EMBED * MLP // split * math.ceil(LAYERS / layout.stage)
    assert f"another all-reduces {found.payload_bytes:,} bytes" in report.notes[-1]
    assert found.payload_bytes == 4 * (VOCAB * EMBED // split + blocks)


@pytest.mark.slow
def test_with_sgd_inside_and_outside_an_average_a_step_is_data_parallel():
    ones = np.ones((BATCH, SEQ), np.float32)  # Every replica has as many tokens.
    sgd = {"optimizer": optax.sgd(0.1), "max_grad_norm": None}
    local = step_of("data=2,sync_every=9", outer_optimizer=optax.sgd(1.0), **sgd)
    plain = step_of("data=2,sync_every=1", **sgd)
    assert str(plain.layout) == "data=2" and not plain.is_local
    states = [local.init(seed=0), plain.init(seed=0)]
    for number in range(3):
        batch = {**batch_of(number), "weights": ones}
        states = [
            step(state, batch)[0]
            for step, state in zip((local, plain), states, strict=True)
        ]
        states[0] = local.sync(states[0])
    assert_close(local.parameters(states[0]), plain.parameters(states[1]))


def test_what_updates_nothing_is_of_the_common_parameters():
    step = step_of(FAST)
    state, _ = trained(step, step.init(seed=0), 0, EVERY + 1)
    common, _ = by_hand(EVERY)
    evaluation = step.evaluate(state, batch_of(7))
    loss = evaluation["loss_sum"]
    weight = evaluation["weight_sum"]
    wanted = loss_by_hand(common, batch_of(7))
    np.testing.assert_allclose(loss / weight, wanted, rtol=1e-5)
    found, gradients = step.loss_and_gradients(state, batch_of(7))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    by_hand_gradients = jax.jit(jax.grad(loss_by_hand))(common, batch_of(7))
    assert_close(step.in_layer_order(gradients), by_hand_gradients)


def test_a_replica_whose_gradients_are_not_finite_alone_skips_its_step():
    step = step_of(FAST)
    state, _ = trained(step, step.init(seed=0), 0, EVERY)
    before = jax.device_get(state.params)
    weights = batch_of(0)["weights"].copy()
    weights[0] = np.inf  # Of the first replica's share.
    state, metrics = step(state, {**batch_of(0), "weights": weights})
    assert state.skipped.tolist() == [1, 0] and float(metrics["skipped"]) == 1
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True
    ):
        assert np.array_equal(old[0], new[0]) and not np.array_equal(old[1], new[1])


def test_a_state_within_an_interval_is_the_same_on_another_layout_and_back(tmp_path):
    step, other = step_of(FAST), step_of(PIPELINED)
    state, _ = trained(step, step.init(seed=0), 0, EVERY + 1)
    folders = tmp_path / "there", tmp_path / "back"
    with Checkpoints(folders[0], layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, {})
    with Checkpoints(folders[0], layer_orders=other.layer_orders) as checkpoints:
        moved = checkpoints.restore(other.state_shapes, other.shardings)
    common, _ = by_hand(EVERY)
    assert_close(other.in_layer_order(other.parameters(moved)), common)
    with Checkpoints(folders[1], layer_orders=other.layer_orders) as checkpoints:
        checkpoints.save(moved, {})
    with Checkpoints(folders[1], layer_orders=step.layer_orders) as checkpoints:
        back = checkpoints.restore(step.state_shapes, step.shardings)
    jax.tree.map(np.testing.assert_array_equal, back, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(PIPELINED, "data=2,sync_every=2"), ("data=2,sync_every=2", PIPELINED)],
)
def test_a_run_goes_on_within_an_interval_on_another_layout(before, after, tmp_path):
    step = step_of(before)
    state, _ = trained(step, step.init(seed=0), 0, EVERY + 1)
    with Checkpoints(tmp_path, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, {})
    other = step_of(after)
    with Checkpoints(tmp_path, layer_orders=other.layer_orders) as checkpoints:
        state = checkpoints.restore(other.state_shapes, other.shardings)
    state, losses = trained(other, state, EVERY + 1, 3 * EVERY)
    wanted, wanted_losses = by_hand(3 * EVERY)
    np.testing.assert_allclose(losses, wanted_losses[EVERY + 1 :], rtol=1e-5)
    assert_close(other.in_layer_order(other.parameters(state)), wanted)


def test_other_replicas_cannot_go_on_from_a_checkpoint(tmp_path, refuses):
    step, other = step_of(FAST), step_of("data=4,sync_every=2")
    with Checkpoints(tmp_path, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(zeros_of(step), {})
        with refuses("checkpoint.other_replicas", 2, 4, kind=CheckpointError):
            checkpoints.restore(other.state_shapes, other.shardings)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (
            "fsdp=2,sync_every=4",
            ("layout.sync_of_one_replica", "sync_every=4", "data=1"),
        ),
        ("data=2,sync_every=2,zero=1", ("layout.sync_with_shared_states", "zero=1")),
        (
            "data=2,sync_every=2,zero=3,zero_axes=data",
            ("layout.sync_with_shared_states", "zero=3"),
        ),
        (
            "data=2,sync_every=2,optimizer_memory=host",
            ("layout.sync_with_host_memory", "optimizer_memory"),
        ),
        ("data=2,sync_every=0", ("layout.not_whole_number", "sync_every=0", 1)),
    ],
)
def test_what_no_replicas_can_have_is_refused_and_lint_says_so(line, refusal, refuses):
    with refuses(*refusal):
        step_of(line)
    if "sync_every=0" not in line:
        assert refusal[0] in [finding.key for finding in lint(MODEL, line).findings]


def test_rules_that_split_the_parameters_of_a_replica_are_refused(refuses):
    rules = replace(DATA_PARALLEL, parameters={"embed": "data"})
    with refuses("rules.split_replicas", "'embed'", "'data'", "sync_every=2"):
        step_of("data=2,sync_every=2", rules=rules)


def test_an_outer_optimizer_without_local_steps_is_refused(refuses):
    with refuses("optimizer.outer_without_local_steps", "sync_every=1", 2):
        step_of("data=2", outer_optimizer=nesterov())
    step = step_of("data=2,sync_every=1", optimizer=optax.sgd(0.1), max_grad_norm=None)
    with refuses("step.no_replicas_to_average", "sync_every=1"):
        step.sync(step.state_shapes)
    with refuses("step.no_replicas_to_average", "sync_every=1"):
        audit(step.sync_program, batch_of(0))


def curve(model, line):
    """Losses of two intervals, and the common parameters."""
    layout = Layout.parse(f"{line},sync_every=2")
    devices = jax.devices()[: layout.num_devices]
    options = {"max_grad_norm": MAX_NORM, "compiler_options": QUICK}
    step = make_train_step(model, INNER, layout, devices=devices, **options)
    batch, losses = random_batch(model, BATCH, 16, seed=0), []
    state = step.init(seed=0)
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, step.in_layer_order(step.parameters(state))


EXPERTS = MoEConfig(
    layers=2, embed=16, heads=4, kv_heads=2, vocab=32, experts=4, top_k=2, expert_ffn=8
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: moe(EXPERTS), "data=2,expert=2"),
        (lambda: build("test"), "data=2,context=2"),
        (lambda: build("test"), "data=2,fsdp=2,zero=1"),
        (lambda: build("test"), "data=2,fsdp=2,microbatches=2,fsdp_gather=microbatch"),
        (
            lambda: build(
                layers=2, hidden=32, heads=4, vocab=64, max_seq=16, dropout=0.2
            ),
            "data=2,stage=2,microbatches=2",
        ),
    ],
)
def test_what_a_replica_is_split_over_changes_nothing(make, line):
    model = make()
    losses, parameters = curve(model, line)
    wanted_losses, wanted = curve(model, "data=2")
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_close(parameters, wanted)


def test_masters_start_an_interval_from_the_common_parameters():
    step = step_of("data=2,precision=bf16,param_dtype=bf16,sync_every=2")
    state, _ = trained(step, step.init(seed=0), 0, EVERY)
    common = jax.tree.leaves(common_state(state).start)
    for masters, start in zip(
        jax.tree.leaves(state.opt_state.master), common, strict=True
    ):
        for master in np.asarray(masters):
            np.testing.assert_array_equal(master, start)


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", ["bf16", "bf16_stochastic"])
def test_parameters_of_16_bits_start_an_interval_from_the_common_ones(param_dtype):
    line = f"data=2,precision=bf16,param_dtype={param_dtype},sync_every=2"
    step = step_of(line)
    state, losses = trained(step, step.init(seed=0), 0, 2 * EVERY)
    np.testing.assert_allclose(losses, by_hand(2 * EVERY)[1], rtol=0.05)
    common = common_state(state).start
    for array, start in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(common), strict=True
    ):
        one, other = np.asarray(array, np.float32)
        assert array.dtype == jnp.bfloat16 and start.dtype == jnp.float32
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, start, rtol=2**-7)


@pytest.mark.slow
def test_a_models_state_is_each_replicas_own_and_averaged_with_the_parameters():
    model = moe(replace(EXPERTS, bias_rate=0.01))
    layout = Layout.parse("data=2,expert=2,sync_every=2")
    devices, options = jax.devices()[:4], {"compiler_options": QUICK}
    step = make_train_step(model, INNER, layout, devices=devices, **options)
    batch, state = random_batch(model, BATCH, 16, seed=0), step.init(seed=0)
    state, _ = step(state, batch)
    within = jax.tree.leaves(jax.device_get(state.model_state))
    assert any(not np.array_equal(*array) for array in within)
    state, _ = step(state, batch)
    behind = jax.tree.leaves(jax.device_get(state.model_state))
    assert all(np.array_equal(*array) for array in behind)
    assert any(array.any() for array in behind)
    step.evaluate(state, batch)
