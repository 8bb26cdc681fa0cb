"""Programs that generation is compared with: a Llama by hand, and transformers' own."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.models.llama import LlamaConfig

# B batch, T tokens, S places of the cache, D embed, F mlp, N heads, K kv heads, G heads
# for each, H head_dim.


def by_hand(
    config: LlamaConfig, params: Any, prompts: np.ndarray, num_tokens: int
) -> Any:
    """A decode loop of plain JAX: layers unrolled, one contiguous cache, greedy."""
    blocks = [
        jax.tree.map(lambda x, at=at: x[at], params["blocks"])
        for at in range(config.layers)
    ]
    weights = {**params, "blocks": blocks}
    size = prompts.shape[1] + num_tokens
    shape = (len(prompts), size, config.kv_heads, config.size_per_head)
    empty = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in blocks]
    run = jax.jit(functools.partial(_advanced, config), donate_argnums=1)

    def loop(num: int) -> tuple[np.ndarray, float, float]:
        cache = jax.tree.map(jnp.copy, empty)
        start = time.perf_counter()
        token, cache = run(weights, cache, prompts, 0)
        found, ends = [np.asarray(token)], [time.perf_counter()]
        for at in range(num - 1):
            token, cache = run(weights, cache, token[:, None], prompts.shape[1] + at)
            found.append(np.asarray(token))
            ends.append(time.perf_counter())
        each = (ends[-1] - ends[0]) / (len(ends) - 1)
        return np.stack(found, 1), ends[0] - start, each

    return loop


def _advanced(
    config: LlamaConfig, weights: Any, cache: list, tokens: Any, start: Any
) -> tuple[jax.Array, list]:
    x = weights["token_embed"][tokens]
    positions = start + jnp.arange(tokens.shape[1])
    kept = []
    for block, of_layer in zip(weights["blocks"], cache, strict=True):
        normed = _norm(config, x, block["attention_norm"])
        mixed, of_layer = _attended(config, block, normed, of_layer, start, positions)
        x = x + mixed
        normed = _norm(config, x, block["mlp_norm"])
        gate, up = jnp.split(
            jnp.einsum("BTD,DCF->BTCF", normed, block["mlp"]["gate_up"]), 2, axis=2
        )
        hidden = jax.nn.silu(gate[:, :, 0]) * up[:, :, 0]
        x = x + hidden @ block["mlp"]["down"]
        kept.append(of_layer)
    x = _norm(config, x[:, -1], weights["final_norm"])
    table = weights.get("unembed", weights["token_embed"])
    return jnp.argmax(x @ table.T, axis=-1), kept


def _attended(
    config: LlamaConfig, block: Any, x: Any, cache: Any, start: Any, positions: Any
) -> tuple[jax.Array, tuple]:
    qkv = jnp.einsum("BTD,DKGH->BTKGH", x, block["attention"]["qkv"])
    q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
    q, k = _rotated(config, q, positions), _rotated(config, k, positions)
    keys, values = (
        jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0))
        for old, new in zip(cache, (k, v), strict=True)
    )
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, keys) / config.size_per_head**0.5
    seen = positions[:, None] >= jnp.arange(keys.shape[1])
    chances = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("BKGTS,BSKH->BTKGH", chances, values)
    mixed = mixed.reshape(*x.shape[:2], -1, config.size_per_head)
    return jnp.einsum("BTNH,NHD->BTD", mixed, block["attention"]["out"]), (keys, values)


def _rotated(config: LlamaConfig, x: Any, positions: Any) -> jax.Array:
    half = config.size_per_head // 2
    frequencies = config.rope_theta ** (-jnp.arange(half) / half)
    angles = positions[:, None] * frequencies
    shape = (1, len(positions), *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).reshape(shape), jnp.sin(angles).reshape(shape)
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def _norm(config: LlamaConfig, x: Any, norm: Any) -> jax.Array:
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + config.norm_epsilon) * norm["scale"]


def transformers_loop(config: LlamaConfig, params: Any, prompts: np.ndarray) -> Any:
    """`LlamaForCausalLM` of transformers with the same weights, greedy."""
    import torch
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM(
        TheirConfig(
            vocab_size=config.vocab,
            hidden_size=config.embed,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_epsilon,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tied,
        )
    ).eval()
    theirs.load_state_dict(_their_weights(config, params), strict=False)
    theirs.tie_weights()
    given = torch.tensor(prompts)

    @torch.inference_mode()
    def loop(num: int) -> tuple[np.ndarray, float, float]:
        start = time.perf_counter()
        out = theirs(given, use_cache=True, logits_to_keep=1)
        found, ends = [out.logits[:, -1].argmax(-1)], [time.perf_counter()]
        for _ in range(num - 1):
            past = out.past_key_values
            out = theirs(found[-1][:, None], past_key_values=past, use_cache=True)
            found.append(out.logits[:, -1].argmax(-1))
            ends.append(time.perf_counter())
        each = (ends[-1] - ends[0]) / (len(ends) - 1)
        return torch.stack(found, 1).numpy(), ends[0] - start, each

    return loop


def _their_weights(config: LlamaConfig, params: Any) -> dict[str, Any]:
    import torch

    def tensor(array: Any, *shape: int) -> Any:
        return torch.tensor(np.asarray(array).reshape(shape).T.copy())

    embed, blocks = config.embed, params["blocks"]
    found = {
        "model.embed_tokens.weight": torch.tensor(np.asarray(params["token_embed"])),
        "model.norm.weight": torch.tensor(np.asarray(params["final_norm"]["scale"])),
    }
    for layer in range(config.layers):
        one = jax.tree.map(lambda x, at=layer: x[at], blocks)
        qkv, name = one["attention"]["qkv"], f"model.layers.{layer}."
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        gate_up = one["mlp"]["gate_up"]
        found |= {
            f"{attention}q_proj.weight": tensor(qkv[:, :, :-2], embed, -1),
            f"{attention}k_proj.weight": tensor(qkv[:, :, -2], embed, -1),
            f"{attention}v_proj.weight": tensor(qkv[:, :, -1], embed, -1),
            f"{attention}o_proj.weight": tensor(one["attention"]["out"], -1, embed),
            f"{mlp}gate_proj.weight": tensor(gate_up[:, 0], embed, -1),
            f"{mlp}up_proj.weight": tensor(gate_up[:, 1], embed, -1),
            f"{mlp}down_proj.weight": tensor(one["mlp"]["down"], -1, embed),
        }
        for ours, other in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            scale = torch.tensor(np.asarray(one[ours]["scale"]))
            found[f"{name}{other}.weight"] = scale
    return found
