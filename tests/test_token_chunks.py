"""Chunks of tokens change nothing but memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, Scope, audit, make_train_step
from meshpar.model.tracing import batch_shapes
from meshpar.models.presets import build
from meshpar.parallel import sizes
from meshpar.parallel.remat import in_token_chunks
from meshpar.testing.equivalence import check_layouts
from tests.marks import slow
from tests.pipelined import assert_equal_to_plain

SIZES = dict(layers=2, hidden=32, heads=4, vocab=64)
SWIGLU = build(**SIZES, gated=True, kv_heads=2, ffn=64)
GELU = build(**SIZES, max_seq=64)
SEQ = 24


@pytest.fixture
def few_bytes(monkeypatch):
    """Room for the hidden values of a few tokens."""
    monkeypatch.setattr(sizes, "HIDDEN_BYTES", 10_000)


def in_chunks(function, weights, x, scope):
    shape, axes = (*x.shape[:2], 256), ("batch", "seq", "mlp")
    return in_token_chunks(function, weights, x, scope, widest=shape, widest_axes=axes)


@pytest.mark.parametrize(("seq", "sizes"), [slow(24, {4}), (23, {5}), (4, {4})])
def test_values_and_gradients_are_those_of_all_tokens_at_once(few_bytes, seq, sizes):
    """256 values of 2 examples are 2,048 bytes a token, so that 4 or 5 tokens fit."""
    rng = np.random.default_rng(0)
    x, up, down = (
        jnp.asarray(rng.normal(size=shape) * std, jnp.float32)
        for shape, std in (((2, seq, 8), 1), ((8, 256), 1), ((256, 8), 1 / 16))
    )
    seen = set()

    def mlp(weights, x):
        seen.add(x.shape[1])
        return jnp.tanh(x @ weights[0]) @ weights[1]

    def loss(weights, x, scope):
        return jnp.sum(jnp.sin(in_chunks(mlp, weights, x, scope)))

    with_gradients = jax.value_and_grad(loss, argnums=(0, 1))
    wanted = with_gradients((up, down), x, Scope())
    assert seen == {seq}
    seen.clear()
    found = with_gradients((up, down), x, Scope(recomputed=True))
    assert seen == sizes
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("few_bytes")
def test_chunks_have_the_gradients_of_the_model_alone():
    assert_equal_to_plain(GELU, "data=2,remat=save:mlp_hidden")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "line"),
    [(SWIGLU, "context=2,tensor=2,remat=full"), (GELU, "data=2,remat=save:mlp_hidden")],
    ids=["swiglu", "gelu"],
)
def test_chunks_of_tokens_train_as_whole_sequences_do(few_bytes, model, line):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 64, (2, 4, SEQ), np.int32)
    weights = np.ones((4, SEQ), np.float32)
    batch = dict(tokens=tokens, targets=targets, weights=weights)
    assert check_layouts(model, batch, [line]).ok


@pytest.mark.slow
def test_chunks_send_the_bytes_of_whole_sequences(monkeypatch):
    sent, runs = [], []
    for room in (2**30, 10_000):
        monkeypatch.setattr(sizes, "HIDDEN_BYTES", room)
        layout = Layout.parse("context=2,tensor=2,remat=full")
        devices = jax.devices()[: layout.num_devices]
        step = make_train_step(SWIGLU, optax.sgd(0.1), layout, devices=devices)
        report = audit(step, batch_shapes(SWIGLU, 4, seq=SEQ))
        assert not report.hazards and not any(row.surprise for row in report.rows)
        rows = report.to_json()["collectives"]
        sent.append(sum(row["payload_bytes"] * row["executions"] for row in rows))
        runs.append(
            sum(row["executions"] for row in rows if row["kind"] == "all-reduce")
        )
    assert sent[1] == sent[0]
    assert runs[1] > runs[0]
