"""Attention over a split sequence equals a dense softmax, in values and gradients."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshpar import Layout
from meshpar.hardware.platforms import PLATFORMS
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.models.layers.attention import attend
from meshpar.parallel.context.attention import shard_attention
from meshpar.parallel.context.mask import Hops, Mask
from meshpar.parallel.sequence import token_order
from meshpar.trace.walk import array_shape, equations
from tests.covering import every_pair
from tests.marks import slow

BATCH, HEADS, HEAD_DIM = 2, 8, 8
BOUND = 2e-6
METHODS = ("ring", "allgather", "ulysses")
BOTH = [
    ("ulysses:2+ring:2", 4),
    ("ulysses:2+allgather:2", 4),
    ("ulysses:2+ring:4", 8),
    ("ulysses:4+ring:2", 8),
]
SEQ = P(None, "context")


def dense(q, k, v, mask, segments, prefix, sinks):
    """Written out, with all scores at once."""
    seq, keys = q.shape[1], k.shape[1]
    k, v = (jnp.repeat(x, HEADS // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    i, j = np.arange(seq)[:, None], np.arange(keys)[None]
    seen = np.broadcast_to(i >= j if mask.causal else True, (BATCH, seq, keys)).copy()
    if mask.window is not None:
        seen &= abs(i - j) < mask.window
    if prefix is not None:
        seen |= j < np.asarray(prefix)[:, None, None]
    if segments is not None:
        seen &= segments[:, :, None] == segments[:, None]
        seen &= segments[:, None] >= 0
    scores = jnp.where(seen[:, None], scores, -1e30)
    if sinks is not None:
        more = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, more], -1)
    p = jax.nn.softmax(scores, -1)[..., :keys]
    p = jnp.where(seen.any(-1)[:, None, :, None], p, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def documents(seq):
    """Numbers of documents that cross every device's tokens; padding, and a whole
    device of it."""
    found = np.zeros((BATCH, seq), np.int32)
    cuts = [0, seq // 6, seq // 3, 5 * seq // 8, seq]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        found[0, start:end] = number
    found[0, cuts[-2] :] = -1
    found[1, seq // 2 :] = 7
    return found


def order_of(method, ranks):
    return token_order(Layout(context=ranks, attention=method))


@functools.cache
def numbers(seq, kv_heads):
    rng = np.random.default_rng(0)
    sizes = (HEADS, kv_heads, kv_heads, HEADS)
    return [
        rng.normal(size=(BATCH, seq, heads, HEAD_DIM)).astype(np.float32)
        for heads in sizes
    ]


def worst(
    method, ranks, mask, kv_heads, *, packed=False, prefix=None, sinks=False, whole=None
):
    """The largest error of output and gradients, of the largest value of each."""
    seq = 32
    q, k, v, dy = numbers(seq, kv_heads)
    segments = documents(seq) if packed else None
    prefix = None if prefix is None else np.asarray(prefix, np.int32)
    logits = np.linspace(-1, 2, HEADS, dtype=np.float32) if sinks else None
    order = order_of(method, ranks)

    @jax.jit
    def plain(q, k, v, sinks, dy):
        y, vjp = jax.vjp(
            lambda q, k, v, sinks: dense(q, k, v, mask, segments, prefix, sinks),
            *(q, k, v, sinks),
        )
        return y, *vjp(dy)

    def local(q, k, v, dy, segments, prefix, logits):
        own = lambda x: None if x is None else order.own(x, 1)  # noqa: E731
        q, k, v, dy, segments = map(own, (q, k, v, dy, segments))
        found, vjp = jax.vjp(
            lambda q, k, v, sinks: shard_attention(
                q,
                k,
                v,
                mask=mask,
                order=order,
                rank=order.rank(),
                q_segments=segments,
                k_segments=segments,
                prefix=prefix,
                sinks=sinks,
                whole=whole,
            ),
            *(q, k, v, logits),
        )
        *gradients, of_sinks = vjp(dy)
        return found, *gradients, jax.lax.psum(of_sinks, "context")

    mesh = Mesh(
        np.array(jax.devices()[:ranks]), ("context",), axis_types=(AxisType.Auto,)
    )
    split = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(),) * 7,
            out_specs=(SEQ, SEQ, SEQ, SEQ, P()),
            check_vma=False,
        )
    )
    found = split(q, k, v, dy, segments, prefix, logits)
    wanted = jax.device_get(plain(q, k, v, logits, dy))
    places = np.concatenate(
        [order.positions(seq // ranks, rank) for rank in range(ranks)]
    )
    errors = []
    for got, want in zip(jax.device_get(found), wanted, strict=True):
        if got is None:
            continue
        got = got[:, np.argsort(places)] if got.ndim == 4 else got
        assert np.isfinite(got).all()
        errors.append(float(np.abs(got - want).max() / np.abs(want).max()))
    return max(errors)


FEW = [
    ("ring", 4, dict(mask=Mask(), kv_heads=1, packed=True, sinks=True)),
    ("ring", 2, dict(mask=Mask(causal=False, window=5), kv_heads=8)),
    ("allgather", 4, dict(mask=Mask(), kv_heads=4, packed=True)),
    ("ring", 2, dict(mask=Mask(prefix=True), kv_heads=4, prefix=(3, 20))),
    ("ulysses:2+ring:2", 4, dict(mask=Mask(), kv_heads=2, packed=True, sinks=True)),
    slow("ring", 8, dict(mask=Mask(window=5), kv_heads=2)),
    slow("ring", 2, dict(mask=Mask(causal=False), kv_heads=8, packed=True)),
    slow("allgather", 2, dict(mask=Mask(causal=False, window=3), kv_heads=8)),
    slow("ulysses", 4, dict(mask=Mask(), kv_heads=2, packed=True, sinks=True)),
    slow("ulysses:2+ring:2", 4, dict(mask=Mask(), kv_heads=1, packed=True, sinks=True)),
    slow("ulysses:4+ring:2", 8, dict(mask=Mask(), kv_heads=2, packed=True)),
]


@pytest.mark.parametrize(("method", "ranks", "case"), FEW)
def test_it_equals_a_dense_softmax(method, ranks, case):
    assert worst(method, ranks, **case) < BOUND


def test_a_kernel_for_whole_sequences_is_taken_between_the_all_to_alls():
    taken = []

    def kernel(q, k, v):
        taken.append(q.shape)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    assert worst("ulysses", 4, Mask(), 2, whole=kernel) < BOUND
    assert set(taken) == {(BATCH, 32, HEADS // 4, HEAD_DIM)}


MASKS = {
    "causal": Mask(),
    "bidirectional": Mask(causal=False),
    "windowed": Mask(window=5),
    "wide_window": Mask(causal=False, window=9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "kind", "packed", "kv_heads"),
    every_pair(
        [*itertools.product(METHODS, (2, 4, 8)), *BOTH], MASKS, (False, True), (1, 4, 8)
    ),
)
def test_every_method_equals_a_dense_softmax(split, kind, packed, kv_heads):
    method, ranks = split
    assert worst(method, ranks, MASKS[kind], kv_heads, packed=packed) < BOUND


def test_groups_share_out_their_two_chunks():
    """Four chunks of 4: group 0 has the first and the last, and so on."""
    order = order_of("ulysses:2+ring:2", 4)
    places = [order.positions(4, rank).tolist() for rank in range(4)]
    assert places == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    across = order.group_order()
    assert across.positions(8, 0).tolist() == places[0] + places[1]
    assert across.hop(1) == [(0, 2), (2, 0), (1, 3), (3, 1)]


def tiles_needed(hops, rank):
    """Tiles of scores of a device that have a pair which sees."""
    return sum(len(hops.live(hop, rank)) for hop in hops.needed)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("tiles_of_chunk", [4, 8])
def test_zigzag_gives_every_device_the_same_causal_work(ranks, tiles_of_chunk):
    tokens = 2 * tiles_of_chunk
    hops = Hops(
        mask=Mask(),
        order=order_of("ring", ranks),
        queries=tokens,
        keys=tokens,
        tiles=(1, 1),
    )
    needed = [tiles_needed(hops, rank) for rank in range(ranks)]
    assert max(needed) <= 1.05 * sum(needed) / ranks
    assert sum(needed) == ranks * tokens * (ranks * tokens + 1) // 2
    made = sum(
        max(len(hops.live(hop, rank)) for rank in range(ranks)) for hop in hops.needed
    )
    assert made <= 1.05 * sum(needed) / ranks


def test_natural_order_would_leave_devices_idle():
    order = TokenOrder(mesh_axis="context", num_ranks=4)
    hops = Hops(mask=Mask(), order=order, queries=8, keys=8, tiles=(1, 1))
    needed = [tiles_needed(hops, rank) for rank in range(4)]
    assert max(needed) > 1.6 * sum(needed) / 4


def test_a_window_leaves_hops_out():
    order = order_of("ring", 8)
    hops = Hops(mask=Mask(window=3), order=order, queries=8, keys=8, tiles=(1, 1))
    assert hops.needed == (0, 1, 7)


def test_a_prefix_and_a_window_are_refused(refuses):
    q, k, v, _ = numbers(32, 8)
    prefix = jnp.zeros(BATCH, jnp.int32)
    with refuses("attention.window_with_prefix", "window=4"):
        shard_attention(q, k, v, mask=Mask(window=4), prefix=prefix)


def test_a_prefix_or_documents_by_half_are_refused(refuses):
    q, k, v, _ = numbers(32, 8)
    prefix, segments = jnp.zeros(BATCH, jnp.int32), jnp.zeros((BATCH, 32), jnp.int32)
    with refuses("attention.prefix_and_mask_differ", "Mask(prefix=False)"):
        shard_attention(q, k, v, mask=Mask(), prefix=prefix)
    with refuses(
        "attention.prefix_and_mask_differ", "Mask(prefix=True)", "prefix=None"
    ):
        shard_attention(q, k, v, mask=Mask(prefix=True))
    with refuses("attention.segments_of_one_side", "q_segments", "k_segments"):
        shard_attention(q, k, v, mask=Mask(), q_segments=segments)


def test_a_window_below_one_is_refused(refuses):
    with refuses("attention.window_too_small", "window=0", 1):
        Mask(window=0)


@pytest.mark.parametrize("seq", [37, slow(200)])
def test_sequences_that_no_tile_divides_are_padded(seq, monkeypatch):
    small = dataclasses.replace(PLATFORMS["cpu"], largest_tile=16)
    monkeypatch.setitem(PLATFORMS, "cpu", small)
    monkeypatch.setattr("meshpar.parallel.sizes.SMALLEST_TILE", 16)
    q, k, v, _ = numbers(seq, 4)
    found = jax.jit(functools.partial(shard_attention, mask=Mask()))(q, k, v)
    wanted = jax.jit(lambda *qkv: dense(*qkv, Mask(), None, None, None))(q, k, v)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_memory_of_the_tiles_is_linear_in_the_sequence():
    """Values and gradients at 4 times the tokens take 4 times the bytes, not 16."""

    def temp_bytes(seq):
        shape = jax.ShapeDtypeStruct((1, seq, 4, 32), jnp.float32)

        def loss(q, k, v):
            return jnp.sum(shard_attention(q, k, v, mask=Mask()) ** 2)

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        memory = gradients.lower(shape, shape, shape).compile().memory_analysis()
        return memory.temp_size_in_bytes

    tile = 4 * 4 * 1024 * 1024  # of scores, of 4 heads
    assert temp_bytes(16384) - 3 * tile < 4.2 * temp_bytes(4096)


@pytest.mark.parametrize(
    ("platform", "seq", "keeps"),
    [("cpu", 512, True), ("cpu", 520, False), ("", 520, True)],
)
def test_a_platform_says_which_sequences_keep_their_scores(platform, seq, keeps):
    q, k, v = (jax.ShapeDtypeStruct((1, seq, 2, 8), jnp.float32) for _ in range(3))
    scope = Scope(platform=platform)
    program = jax.make_jaxpr(functools.partial(attend, scope=scope, causal=True))(
        q, k, v
    )
    shapes = {
        array_shape(atom) for one in equations(program.jaxpr) for atom in one.outvars
    }
    assert any(shape[-2:] == (seq, seq) for shape in shapes) == keeps
