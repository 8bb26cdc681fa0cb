"""Layers equal plain references, presets have published sizes, models are causal."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshpar import Scope
from meshpar.model.parameter import is_parameter
from meshpar.model.tracing import forward
from meshpar.models.layers.attention import Attention
from meshpar.models.layers.mlp import GatedMLP, PlainMLP
from meshpar.models.layers.norm import LayerNorm, RMSNorm
from meshpar.models.layers.rope import RopeScaling, apply_rope, rope_frequencies
from meshpar.models.presets import build, configure

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EPSILON = 1e-3


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(layer_type, *sizes, **options):
    """A layer with random values in all its parameters, biases and scales too."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(
            nnx.eval_shape(lambda: layer_type(*sizes, **options, rngs=nnx.Rngs(0)))
        )
        shapes, treedef = jax.tree.flatten(state)
        values = [
            jnp.asarray(normal(at, *leaf.shape)) for at, leaf in enumerate(shapes)
        ]
        return nnx.merge(graph, jax.tree.unflatten(treedef, values))


def value(parameter):
    return np.asarray(parameter[...])


# Norms.


def rms_normed(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def test_rms_norm_is_its_formula():
    x, layer = 3 * normal(9, 2, 5, 8), made(RMSNorm, 8, epsilon=EPSILON)
    found = jax.jit(layer)(x)
    np.testing.assert_allclose(found, rms_normed(x, value(layer.scale)), **CLOSE)


def test_layer_norm_is_its_formula():
    x, layer = 3 * normal(9, 2, 5, 8) + 1, made(LayerNorm, 8, epsilon=EPSILON)
    std = np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / std * value(layer.scale) + value(layer.bias)
    np.testing.assert_allclose(jax.jit(layer)(x), expected, **CLOSE)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_of_half_precision_are_computed_in_fp32(norm):
    layer = made(norm, 256, epsilon=1e-5)
    x = jnp.asarray(normal(9, 4, 256), jnp.bfloat16)
    found = layer(x)
    assert found.dtype == jnp.bfloat16
    exact = layer(x.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, exact)


# MLPs.


def test_the_gated_mlp_is_its_formula():
    x, layer = normal(9, 2, 3, 4), made(GatedMLP, 4, 6, init_std=1.0, out_std=1.0)
    gate, up = np.moveaxis(value(layer.gate_up), 1, 0)
    gated = x @ gate
    expected = (gated / (1 + np.exp(-gated)) * (x @ up)) @ value(layer.down)
    found = jax.jit(lambda x: layer(x, Scope()))(x)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_the_plain_mlp_is_its_formula():
    x, layer = normal(9, 2, 3, 4), made(PlainMLP, 4, 6, init_std=1.0, out_std=1.0)
    h = x @ value(layer.up) + value(layer.up_bias)
    gelu = h / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    expected = gelu @ value(layer.down) + value(layer.down_bias)
    found = jax.jit(lambda x: layer(x, Scope()))(x)
    np.testing.assert_allclose(found, expected, **CLOSE)


# Rotary positions.

FREQUENCIES = rope_frequencies(16, 10_000.0)


@jax.jit
def turned(x, positions):
    return apply_rope(x, positions, FREQUENCIES)


def rotated(x, positions):
    return np.asarray(turned(x, np.asarray([positions])))


def test_rotary_frequencies_fall_from_1_to_nearly_1_over_theta():
    expected = [10_000.0 ** (-pair / 8) for pair in range(8)]
    np.testing.assert_allclose(FREQUENCIES, expected)


def test_rotation_turns_each_pair_by_position_times_frequency():
    x, positions = normal(0, 1, 3, 2, 16), np.array([0, 5, 900])
    pairs = x[..., :8] + 1j * x[..., 8:]
    turned = pairs * np.exp(1j * positions[:, None, None] * FREQUENCIES)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotated(x, positions), expected, rtol=1e-3, atol=1e-3)


def test_rotation_preserves_norms_and_position_0():
    x = normal(0, 1, 6, 2, 16)
    found = rotated(x, np.arange(6))
    norms = [np.linalg.norm(each, axis=-1) for each in (found, x)]
    np.testing.assert_allclose(*norms, **CLOSE)
    np.testing.assert_array_equal(found[:, 0], x[:, 0])


@pytest.mark.parametrize("shift", [1, 7, 100])
def test_scores_depend_on_relative_positions_only(shift):
    q, k = normal(0, 1, 1, 1, 16), normal(1, 1, 1, 1, 16)
    scores = [
        np.vdot(rotated(q, [5 + start]), rotated(k, [2 + start]))
        for start in (0, shift)
    ]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)


def test_scaling_keeps_short_wavelengths_stretches_long_ones_and_orders_the_rest():
    scaling = RopeScaling(
        factor=8.0, low_factor=1.0, high_factor=4.0, original_seq=8192
    )
    plain = rope_frequencies(128, 500_000.0)
    scaled = rope_frequencies(128, 500_000.0, scaling)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    between = ~short & ~long
    assert short.any()
    assert long.any()
    assert between.any()
    np.testing.assert_allclose(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()
    assert (np.diff(scaled) < 0).all()


def test_scaling_by_1_changes_nothing():
    scaled = rope_frequencies(64, 10_000.0, RopeScaling(factor=1.0))
    np.testing.assert_allclose(scaled, rope_frequencies(64, 10_000.0))


# Attention.

EMBED, HEADS, HEAD_DIM, SEQ = 12, 4, 8, 6


def attention(kv_heads, **options):
    sizes = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": HEAD_DIM}
    return made(Attention, EMBED, **sizes, init_std=1.0, out_std=1.0, **options)


def naive_attention(layer, x, kv_heads, frequencies=None):
    """Key and value heads repeated, then a softmax per head, in numpy."""
    group = HEADS // kv_heads
    qkv = np.einsum("btd,dkgh->btkgh", x, value(layer.qkv))
    if layer.bias is not None:
        qkv = qkv + value(layer.bias)
    q = qkv[:, :, :, :group].reshape(*x.shape[:2], HEADS, HEAD_DIM)
    k, v = (np.repeat(qkv[:, :, :, group + at], group, axis=2) for at in (0, 1))
    if layer.q_norm is not None:
        q = rms_normed(q, value(layer.q_norm.scale))
        k = rms_normed(k, value(layer.k_norm.scale))
    if frequencies is not None:
        at = jax.jit(lambda x: apply_rope(x, np.arange(x.shape[1])[None], frequencies))
        q, k = (np.asarray(at(each)) for each in (q, k))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(HEAD_DIM)
    scores[..., ~np.tri(x.shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    mixed = np.einsum("bnts,bsnh->btnh", weights, v)
    out = np.einsum("btnh,nhd->btd", mixed, value(layer.out))
    return out if layer.out_bias is None else out + value(layer.out_bias)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "out_bias": True},
        {"frequencies": rope_frequencies(HEAD_DIM, 100.0)},
        {"qk_norm_epsilon": EPSILON},
    ],
    ids=["plain", "biases", "rope", "qk norm"],
)
def test_grouped_attention_equals_repeated_heads_in_a_plain_softmax(kv_heads, options):
    layer, x = attention(kv_heads, **options), 0.3 * normal(9, 2, SEQ, EMBED)
    expected = naive_attention(layer, x, kv_heads, options.get("frequencies"))
    found = jax.jit(lambda x: layer(x, Scope()))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_positions_of_the_batch_replace_the_default_ones():
    layer = attention(2, frequencies=rope_frequencies(HEAD_DIM, 100.0))
    x, first = 0.3 * normal(9, 1, SEQ, EMBED), np.arange(SEQ)[None]
    attended = jax.jit(lambda x, batch: layer(x, Scope(batch=batch)))
    default = attended(x, {})
    shifted = attended(x, {"positions": first + 50})
    stretched = attended(x, {"positions": 3 * first})
    np.testing.assert_allclose(shifted, default, rtol=1e-3, atol=1e-4)
    assert not np.allclose(stretched, default, rtol=1e-3, atol=1e-4)


def test_heads_that_do_not_divide_are_refused(refuses):
    with refuses("model.kv_heads_indivisible", "heads=4", "kv_heads=3"):
        attention(3)


# Presets.

# Model cards on the Hugging Face hub (2024-2025); GPT-2 with its tied table once.
PUBLISHED = {
    "gpt2": 124.4e6,
    "gpt2-xl": 1557.6e6,
    "smollm2-135m": 134.5e6,
    "qwen2-0.5b": 494e6,
    "qwen2-7b": 7.62e9,
    "qwen3-8b": 8.19e9,
    "llama3.2-1b": 1.236e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.8e9,
}


@pytest.mark.parametrize("preset, published", PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(preset, published):
    assert build(preset).num_parameters == pytest.approx(published, rel=0.005)


FIXED = "model.value_fixed_by_family"


@pytest.mark.parametrize(
    "preset, changes, refusal",
    [
        ("lama3-8b", {}, ("model.unknown_preset", "'lama3-8b'", "'llama3-8b'")),
        (
            "test",
            {"head": 4},
            ("model.unknown_size", "'head'", "'heads'", "'kv_heads'"),
        ),
        (
            "test",
            {"heads": 3, "kv_heads": 2},
            ("model.kv_heads_indivisible", "heads=3", "kv_heads=2"),
        ),
        (
            "test",
            {"embed": 30},
            ("model.heads_indivisible", "embed=30", "heads=4", "head_dim"),
        ),
        ("test", {"layers": 0}, ("value.below_one", "layers=0", 1)),
        (
            "test",
            {"rope_scaling": 5},
            ("model.rope_scaling_wrong_type", "rope_scaling=5", "RopeScaling"),
        ),
        ("test", {"rope_theta": 0.0}, ("value.not_positive", "rope_theta=0.0")),
        (
            "tiny-gemma3",
            {"local_rope_theta": -1.0},
            ("value.not_positive", "local_rope_theta=-1.0"),
        ),
        ("test", {"norm_epsilon": -1.0}, ("value.negative", "norm_epsilon=-1.0")),
        (
            "tiny-t5",
            {"norm_epsilon": math.nan},
            ("value.not_finite", "norm_epsilon=nan"),
        ),
        ("tiny-gpt2", {"init_std": -1.0}, ("value.negative", "init_std=-1.0")),
        ("tiny-moe", {"init_std": math.nan}, ("value.not_finite", "init_std=nan")),
        ("test", {"head_dim": 7}, ("model.odd_rotary_size", "head_dim=7")),
        ("tiny-moe", {"head_dim": 7}, ("model.odd_rotary_size", "head_dim=7")),
        ("tiny-gemma3", {"head_dim": 7}, ("model.odd_rotary_size", "head_dim=7")),
        (
            "tiny-gpt2",
            {"heads": 3},
            ("model.heads_indivisible", "embed=128", "heads=3"),
        ),
        ("tiny-gpt2", {"vocab": -1}, ("value.below_one", "vocab=-1", 1)),
        (
            "tiny-gpt2",
            {"dropout": 1.0},
            ("model.dropout_out_of_range", "dropout=1.0", 0, 1),
        ),
        ("test", {"seq": -1}, ("value.negative", "max_seq=-1", 0)),
        (
            "tiny-gpt2",
            {"kv_heads": 2},
            (FIXED, "kv_heads=2", "heads=8", "GPT-2", "Llama", "gated=true"),
        ),
        ("tiny-gpt2", {"tied": False}, (FIXED, "tied=False", "GPT-2")),
        ("tiny-gpt2", {"gated": True}, (FIXED, "gated=True", "GPT-2", "Llama")),
        ("test", {"gated": False}, (FIXED, "gated=False", "Llama", "GPT-2")),
        (
            None,
            {"kv_heads": 2},
            ("model.missing_sizes", "layers", "embed", "heads", "vocab"),
        ),
        (None, {"gated": "yes"}, ("value.not_boolean", "gated='yes'")),
        (None, {"heads": 4, "kv_heads": 2}, (FIXED, "kv_heads=2", "heads=4")),
        ("test", {"experts": 8}, ("model.no_experts", "experts=8", "LlamaConfig")),
        (
            None,
            {"gated": True, "top_k": 2},
            ("model.no_experts", "top_k=2", "LlamaConfig"),
        ),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(preset, changes, refusal, refuses):
    with refuses(*refusal):
        build(preset, **changes)


def test_the_words_of_the_command_line_change_fields_too():
    wide, long = build("test", hidden=64), build("tiny-gpt2", seq=32)
    assert wide.flat_parameters()["token_embed"].shape == (64, 64)
    assert long.flat_parameters()["position_embed"].shape == (32, 128)


@pytest.mark.parametrize(
    "preset, says",
    [
        ("test", {"gated": True}),
        ("tiny-gpt2", {"gated": False, "tied": True, "kv_heads": 8}),
        ("tiny-gpt2", {"heads": 4, "kv_heads": 4}),
    ],
)
def test_words_that_say_what_the_family_is_change_nothing(preset, says):
    plain = {"heads": says["heads"]} if "heads" in says else {}
    assert configure(preset, **says) == configure(preset, **plain)


def test_a_llama_takes_sequences_up_to_its_seq_only(refuses):
    model = build("test", seq=8)
    shapes = jax.eval_shape(lambda: model.init(0))
    fits, too_long = (jax.ShapeDtypeStruct((1, seq), jnp.int32) for seq in (8, 9))

    def run(params, tokens):
        batch = {"tokens": tokens}
        return forward(model, params, batch, Scope(batch=batch))

    assert jax.eval_shape(run, shapes, fits).shape == (1, 8, 32)
    with refuses("batch.sequence_too_long", 9, "max_seq=8"):
        jax.eval_shape(run, shapes, too_long)


# Whole models.

SMALL_GPT2 = {"layers": 2, "embed": 32, "heads": 4, "vocab": 64, "max_seq": 8}


@functools.cache
def small(family):
    """A model's jitted `tokens -> logits`, its values large enough to matter."""
    changes = {"llama": {}, "gpt2": SMALL_GPT2}[family]
    model = build({"llama": "test", "gpt2": "tiny-gpt2"}[family], **changes)
    flat = enumerate(model.flat_parameters().values())
    values = [
        jnp.asarray(0.3 * normal(at, *parameter.stacked_shape))
        for at, parameter in flat
    ]
    treedef = jax.tree.structure(model.parameters, is_leaf=is_parameter)
    params = jax.tree.unflatten(treedef, values)

    @jax.jit
    def logits(tokens):
        batch = {"tokens": tokens}
        x = forward(model, params, batch, Scope(batch=batch))
        return model.logits(model.split(params)[0], x, Scope())

    return logits


TOKENS = np.array([[3, 9, 27, 1, 2, 4, 5, 6]], np.int32)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("changed", [1, 4, 7])
def test_a_later_token_changes_no_earlier_logits(family, changed):
    other = TOKENS.copy()
    other[0, changed] = 50
    before, after = small(family)(TOKENS), small(family)(other)
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (np.abs(before - after)[0, changed:].max(axis=-1) > 1e-3).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_tell_the_order_of_the_tokens(family):
    swapped = TOKENS[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    last = [small(family)(tokens)[0, -1] for tokens in (TOKENS, swapped)]
    assert not np.allclose(*last, atol=1e-3)


def test_gpt2_refuses_sequences_longer_than_its_positions(refuses):
    with refuses("batch.sequence_too_long", 9, "max_seq=8"):
        jax.eval_shape(small("gpt2"), jax.ShapeDtypeStruct((1, 9), jnp.int32))
