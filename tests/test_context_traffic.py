"""What crosses `context` in compiled steps: closed forms, with a reason for each."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import Layout, audit, make_mesh, make_train_step
from meshpar.collectives import ASKED
from meshpar.model.tracing import batch_shapes
from meshpar.models.llama import LlamaConfig, llama
from meshpar.parallel.context.attention import shard_attention
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.sequence import token_order

LAYERS, HEADS, KV_HEADS, HEAD_DIM, SEQ, RANKS = 2, 8, 4, 4, 32, 4
TOKENS = SEQ // RANKS
ONE = TOKENS * KV_HEADS * HEAD_DIM * 4  # keys, or values, of a device
BOTH = 2 * ONE
QUERIES = TOKENS * HEADS * HEAD_DIM * 4


def moved(line):
    """Reason -> payload bytes of all its runs in a step."""
    layout = Layout.parse(line)
    model = llama(
        LlamaConfig(
            layers=LAYERS,
            embed=32,
            heads=HEADS,
            kv_heads=KV_HEADS,
            ffn=32,
            vocab=32,
        )
    )
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(model, optax.sgd(0.1), layout, devices=devices)
    return payloads(audit(step, batch_shapes(model, 1, seq=SEQ)))


def payloads(report):
    """Reason -> payload bytes of all its runs."""
    assert not report.hazards and not any(row.surprise for row in report.rows)
    found = Counter()
    for row in report.to_json()["collectives"]:
        found[row["reason"]] += row["payload_bytes"] * row["executions"]
    return found


def words(name):
    return ASKED[name][1]


def moved_by_attention(method):
    """The same of the values and gradients of one attention, without a model."""
    order = token_order(Layout(context=RANKS, attention=method))

    def local(q, k, v):
        attention = functools.partial(shard_attention, mask=Mask(), order=order)
        y, vjp = jax.vjp(lambda *qkv: attention(*qkv, rank=order.rank()), q, k, v)
        return vjp(y)

    mesh = make_mesh(f"context={RANKS}", devices=jax.devices()[:RANKS])
    split = jax.P(None, "context")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    shapes = (
        jax.ShapeDtypeStruct((1, SEQ, heads, HEAD_DIM), jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return payloads(audit(mapped, *shapes, mesh=mesh))


def test_a_rings_attention_sends_keys_and_values_past_every_device():
    found = moved_by_attention("ring")
    assert found[words("context_ring")] == 2 * (RANKS - 1) * BOTH
    assert found[words("context_ring_gradient")] == RANKS * BOTH


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("full", 2)])
def test_a_ring_sends_keys_and_values_past_every_device(remat, forwards):
    """n-1 hops each way, and n of the fp32 gradients, which end where they belong."""
    found = moved(f"context={RANKS},remat={remat}")
    hops = (forwards + 1) * (RANKS - 1)
    assert found[words("context_ring")] == LAYERS * hops * BOTH
    assert found[words("context_ring_gradient")] == LAYERS * RANKS * BOTH


@pytest.mark.slow
def test_a_gather_brings_all_keys_and_values_and_scatters_their_gradients():
    """A payload is the whole: of n devices each receives (n-1)/n of it."""
    found = moved(f"context={RANKS},attention=allgather")
    assert found[words("context_gather")] == LAYERS * 2 * RANKS * BOTH
    assert found[words("context_scatter")] == LAYERS * RANKS * BOTH


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "copies"), [(4, 1), (8, 2)])
def test_ulysses_trades_heads_for_tokens_there_and_back(ranks, copies):
    """Queries, keys, values and what comes of them; the same of their gradients."""
    found = moved(f"context={ranks},attention=ulysses")
    one_way = (2 * QUERIES + copies * BOTH) * RANKS // ranks
    assert found[words("context_heads")] == LAYERS * 2 * one_way


@pytest.mark.slow
def test_both_degrees_trade_heads_in_groups_and_send_them_around_the_ring():
    """Two devices trade; then a device has twice the tokens of half of the heads, and
    one hop reaches the other group."""
    found = moved(f"context={RANKS},attention=ulysses:2+ring:2")
    assert found[words("context_heads")] == LAYERS * 2 * (2 * QUERIES + BOTH)
    assert found[words("context_ring")] == LAYERS * 2 * BOTH
    assert found[words("context_ring_gradient")] == LAYERS * 2 * BOTH
