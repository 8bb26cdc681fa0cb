"""The chunked loss of a head equals the plain one and never holds all logits."""

import functools
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import TENSOR, TENSOR_SEQUENCE, Layout, Scope, make_mesh, make_train_step
from meshpar.audit.report import audit
from meshpar.model.tracing import batch_shapes, loss
from meshpar.models.presets import build
from meshpar.parallel.head_loss import head_cross_entropy
from tests import pipelined
from tests.marks import slow

BATCH, SEQ, VOCAB, EMBED = 3, 8, 40, 6
ROW_BYTES = 4 * VOCAB
RULES = {"tensor": TENSOR, "sequence": TENSOR_SEQUENCE}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrays(seed=0):
    """x, table, targets and weights, some of them 0."""
    random = np.random.default_rng(seed)
    targets = random.integers(0, VOCAB, (BATCH, SEQ), np.int32)
    targets[0, :2] = 0, VOCAB - 1
    weights = random.uniform(0.1, 2.0, (BATCH, SEQ)).astype(np.float32)
    weights[1, 2:5] = 0.0
    return normal(1, BATCH, SEQ, EMBED), normal(2, VOCAB, EMBED), targets, weights


def plain(x, table, targets, weights):
    log_probabilities = jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", x, table))
    one_hot = jax.nn.one_hot(targets, VOCAB)
    losses = -jnp.sum(log_probabilities * one_hot, axis=-1)
    return jnp.sum(losses * weights)


def chunked(x, table, targets, weights, *, scope, logits_bytes):
    x, table = jnp.asarray(x), jnp.asarray(table)
    total, _ = head_cross_entropy(
        x, table, targets, weights, scope, logits_bytes=logits_bytes
    )
    return total


def placed(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@functools.cache
def expected():
    return jax.jit(jax.value_and_grad(plain, (0, 1, 3)))(*arrays())


def found(tensor, rules, tokens_of_a_chunk, platform="cpu", dtype=np.float32):
    scope = Scope(rules=RULES[rules], platform=platform)
    row_bytes = ROW_BYTES // tensor
    function = functools.partial(
        chunked, scope=scope, logits_bytes=row_bytes * tokens_of_a_chunk
    )
    x, table, targets, weights = arrays()
    mesh = make_mesh(Layout(tensor=tensor), jax.devices()[:tensor])
    with jax.set_mesh(mesh):
        place = functools.partial(placed, mesh)
        return jax.jit(jax.value_and_grad(function, (0, 1, 3)))(
            place(x.astype(dtype)),
            place(table.astype(dtype), "tensor"),
            place(targets),
            place(weights),
        )


QUICKLY = (
    *((1, "tensor", 5), (2, "tensor", 100), (4, "tensor", 0), (4, "tensor", 5)),
    *((4, "sequence", 7), (8, "sequence", 1)),
)
"""Devices, rules and tokens of a chunk that are not left to `make test-full`."""

CASES = [
    case if case in QUICKLY else slow(*case)
    for case in itertools.product((1, 2, 4, 8), RULES, (0, 1, 4, 5, 7, 100))
]


@pytest.mark.parametrize(("tensor", "rules", "tokens_of_a_chunk"), CASES)
def test_value_and_gradients_equal_those_of_all_logits_at_once(
    tensor, rules, tokens_of_a_chunk
):
    value, gradients = found(tensor, rules, tokens_of_a_chunk)
    np.testing.assert_allclose(value, expected()[0], rtol=1e-6)
    for got, wanted in zip(gradients, expected()[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rules", RULES)
def test_collectives_that_are_free_to_overlap_change_no_number(rules):
    value, gradients = found(4, rules, 4, platform="gpu")
    np.testing.assert_allclose(value, expected()[0], rtol=1e-6)
    for got, wanted in zip(gradients, expected()[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_tables_gradient_stays_in_its_shards():
    _, (_, dtable, _) = found(4, "tensor", 4)
    assert dtable.sharding.shard_shape(dtable.shape) == (VOCAB // 4, EMBED)


@pytest.mark.parametrize("tensor", [1, 4])
def test_bf16_inputs_keep_fp32_statistics(tensor):
    value, gradients = found(tensor, "tensor", 5, dtype=jnp.bfloat16)
    x, table, targets, weights = arrays()
    rounded = [array.astype(jnp.bfloat16).astype(np.float32) for array in (x, table)]
    wanted = jax.jit(jax.value_and_grad(plain, (0, 1)))(*rounded, targets, weights)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    for got, other in zip(gradients, wanted[1], strict=False):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(got.astype(np.float32) - other) / np.linalg.norm(other)
        assert error < 4 * 2**-9  # logits' gradient, its sum and the scaling rounded


@functools.cache
def value_and_gradient_of_x():
    """One program of chunks for all targets and weights."""
    function = functools.partial(
        chunked, scope=Scope(rules=TENSOR), logits_bytes=4 * ROW_BYTES
    )
    return jax.jit(jax.value_and_grad(function))


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("target", [-100, VOCAB])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_target_outside_the_vocabulary_counts_as_nan_or_not_at_all(
    tensor, target, weight
):
    x, table, targets, weights = arrays()
    targets[0, 1], weights[0, 1] = target, weight
    mesh = make_mesh(Layout(tensor=tensor), jax.devices()[:tensor])
    with jax.set_mesh(mesh):
        total, dx = value_and_gradient_of_x()(x, table, targets, weights)
    assert np.isnan(total) == (weight > 0)
    assert not np.isnan(dx).any()
    assert not dx[0, 1].any()


def test_the_tables_gradient_is_added_up_in_fp32():
    """Of equal tokens, which bf16 would no longer add after the first 256 of them."""
    num_tokens = 1024
    function = functools.partial(chunked, scope=Scope(), logits_bytes=ROW_BYTES)
    dtable = jax.jit(jax.grad(function, 1))(
        jnp.ones((1, num_tokens, EMBED), jnp.bfloat16),
        jnp.zeros((VOCAB, EMBED), jnp.bfloat16),
        jnp.zeros((1, num_tokens), jnp.int32),
        jnp.ones((1, num_tokens), jnp.float32),
    )
    found = dtable[1:].astype(np.float32)
    np.testing.assert_allclose(found, num_tokens / VOCAB, rtol=2**-7)


def test_it_works_without_any_mesh():
    function = functools.partial(chunked, scope=Scope(), logits_bytes=5 * ROW_BYTES)
    value, gradients = jax.jit(jax.value_and_grad(function, (0, 1, 3)))(*arrays())
    np.testing.assert_allclose(value, expected()[0], rtol=1e-6)
    for got, wanted in zip(gradients, expected()[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_sequence_split_throughout_stays_split():
    rules = TENSOR.with_rules(seq="context", residual_seq="context")
    layout = Layout(context=2, tensor=2)
    mesh = make_mesh(layout, jax.devices()[:4])
    function = functools.partial(
        chunked, scope=Scope(rules=rules), logits_bytes=5 * ROW_BYTES // 2
    )
    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(function, (0, 1, 3)))
        x, table, targets, weights = arrays()
        place = functools.partial(placed, mesh)
        args = (
            place(x, None, "context"),
            place(table, "tensor"),
            place(targets, None, "context"),
            place(weights, None, "context"),
        )
        compiled = program.lower(*args).compile()
        value, gradients = compiled(*args)
    np.testing.assert_allclose(value, expected()[0], rtol=1e-6)
    for got, wanted in zip(gradients, expected()[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert "all-gather(" not in compiled.as_text()


def test_a_limit_below_one_tokens_logits_is_refused_with_both_numbers(refuses):
    with refuses("model.logits_bytes_too_small", "logits_bytes=100", ROW_BYTES):
        chunked(*arrays(), scope=Scope(), logits_bytes=100)


VOCAB_OF_MODEL = 4096
MODEL = dict(layers=2, hidden=32, heads=4, vocab=VOCAB_OF_MODEL, max_seq=64)


def report_of(line, logits_bytes):
    model = build(**MODEL, logits_bytes=logits_bytes)
    layout = Layout.parse(f"{line},remat=full")
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(model, optax.sgd(0.1), layout, devices=devices)
    return audit(step, batch_shapes(16, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "fsdp=2,tensor=2",
        "data=2",
        "tensor=4,sequence_parallel=true",
        "stage=2,tensor=2,microbatches=2",
        "microbatches=4",
    ],
)
def test_no_array_of_a_step_is_larger_than_the_logits_allowed(line):
    layout = Layout.parse(line)
    rows = 16 * 64 // layout.batch_shards // layout.microbatches // layout.stage
    vocab = VOCAB_OF_MODEL // layout.tensor
    all_logits = rows * 4 * vocab
    limit = all_logits // 8
    tables = [[embed, vocab] for embed in (16, 32)]  # whole, and split over fsdp

    def is_logits(buffer):
        dims = sorted(size for size in buffer.dims if size > 1)
        return vocab in dims and dims not in tables and buffer.bytes > limit

    report = report_of(line, limit)
    assert not [buffer for buffer in report.buffers if is_logits(buffer)]
    at_once = report_of(line, 0)
    largest = max(filter(is_logits, at_once.buffers), key=lambda one: one.bytes)
    assert largest.bytes == all_logits
    assert at_once.memory.temp_bytes - report.memory.temp_bytes > all_logits / 2
    assert math.isclose(at_once.flops, report.flops, rel_tol=0.001)


SPLIT, STAGED = (
    "fsdp=2,tensor=2,sequence_parallel=true",
    "stage=2,data=2,microbatches=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("line", [SPLIT, STAGED])
def test_a_head_of_chunks_gives_a_step_the_loss_and_gradients_of_another(line):
    model = pipelined.mlp_of(2)

    def head(params, x, batch, scope):
        targets, weights = batch["targets"], batch["weights"]
        return head_cross_entropy(
            x, params["table"], targets, weights, scope, logits_bytes=6 * 4 * 64
        )

    step, value, gradients = pipelined.pipelined(replace(model, head=head), line)
    wanted, other = pipelined.plain(model)
    assert value == pytest.approx(float(wanted), rel=1e-5)
    pipelined.assert_close(step.in_layer_order(gradients), other)


@functools.cache
def model_of(preset, logits_bytes):
    return build("test", tied=preset == "tied", logits_bytes=logits_bytes)


@functools.cache
def whole(preset):
    """Loss and gradients of the model alone, of all logits at once."""
    model = model_of(preset, 0)
    program = jax.value_and_grad(lambda params, batch: loss(model, params, batch))
    return jax.device_get(jax.jit(program)(pipelined.params_of(model), tokens()))


def tokens():
    ids = np.random.default_rng(0).integers(0, 64, (8, 17), np.int32)
    return dict(tokens=ids[:, :-1], targets=ids[:, 1:], weights=np.ones((8, 16)))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tied", "untied"])
@pytest.mark.parametrize("line", [SPLIT, STAGED])
def test_a_step_with_chunks_has_the_models_own_loss_and_gradients(preset, line):
    model = model_of(preset, 6 * 4 * 64)
    step = pipelined.step_of(model, line)
    state = pipelined.state_of(step, model)
    value, gradients = step.loss_and_gradients(state, tokens())
    wanted, other = whole(preset)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6),
        step.in_layer_order(gradients),
        other,
    )
