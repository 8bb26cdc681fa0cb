"""A Llama training step in plain JAX, its shardings written by hand; no meshpar.

What a careful engineer writes for one model on one mesh of ("data", "fsdp", "tensor"):
a dict of stacked parameters, `lax.scan` over the blocks, `jax.value_and_grad`, and
GSPMD over all three mesh axes. `step_time.py` measures meshpar against it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.recipes.bench.plain_optimizer import state_shardings, updated

_BATCH = ("data", "fsdp")
_EPSILON = 1e-5
_ROPE_THETA = 10_000.0

# At rest: the embed dim over fsdp, heads, mlp and vocab over tensor.
_STORED = {
    "token_embed": P("tensor", "fsdp"),
    "final_norm": {"scale": P("fsdp")},
    "unembed": P("tensor", "fsdp"),
    "blocks": {
        "attention_norm": {"scale": P(None, "fsdp")},
        "attention": {
            "qkv": P(None, "fsdp", "tensor", None, None),
            "out": P(None, "tensor", None, "fsdp"),
        },
        "mlp_norm": {"scale": P(None, "fsdp")},
        "mlp": {
            "gate_up": P(None, "fsdp", None, "tensor"),
            "down": P(None, "tensor", "fsdp"),
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class HandWritten:
    """The jitted step and what places its arguments.

    Args:
        step: (params, opt_state, batch) -> (params, opt_state, metrics); the first two
            are donated.
        optimizer: What `opt_state` belongs to.
        params, opt_state, batch: Shardings.
    """

    step: Callable[..., tuple[Any, Any, dict[str, jax.Array]]]
    optimizer: optax.GradientTransformation
    params: Any
    opt_state: Any
    batch: NamedSharding


def hand_written(
    optimizer: optax.GradientTransformation,
    params: Any,
    mesh_shape: tuple[int, int, int],
    devices: Sequence[jax.Device],
    *,
    max_grad_norm: float,
) -> HandWritten:
    """The step for `params` (arrays or shapes) on a mesh of (data, fsdp, tensor)."""
    mesh = Mesh(np.array(devices).reshape(mesh_shape), (*_BATCH, "tensor"))
    on_mesh = functools.partial(NamedSharding, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(max_grad_norm), optimizer)
    param_shardings = jax.tree.map(on_mesh, _STORED, is_leaf=_is_spec)
    opt_shardings = state_shardings(optimizer, params, param_shardings, on_mesh(P()))
    step = jax.jit(
        functools.partial(_step, optimizer, mesh),
        in_shardings=(param_shardings, opt_shardings, on_mesh(P(_BATCH))),
        out_shardings=(param_shardings, opt_shardings, on_mesh(P())),
        donate_argnums=(0, 1),
    )
    return HandWritten(
        step=step,
        optimizer=optimizer,
        params=param_shardings,
        opt_state=opt_shardings,
        batch=on_mesh(P(_BATCH)),
    )


def _step(
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Any,
    opt_state: Any,
    batch: dict[str, jax.Array],
) -> tuple[Any, Any, dict[str, jax.Array]]:
    loss, gradients = jax.value_and_grad(_loss)(params, batch, mesh)
    return updated(optimizer, params, opt_state, loss, gradients)


def _loss(params: Any, batch: dict[str, jax.Array], mesh: Mesh) -> jax.Array:
    at = functools.partial(_constrain, mesh)
    # The tables are gathered over fsdp by hand: left alone, GSPMD looks the split rows
    # up and gathers the activations. In the blocks it gathers the weights by itself, in
    # both passes, as the activations are pinned.
    tables = {
        name: at(params[name], "tensor", None) for name in ("token_embed", "unembed")
    }
    x = at(tables["token_embed"][batch["tokens"]], _BATCH)
    rope = rope_tables(x.shape[1], params["blocks"]["attention"]["qkv"].shape[-1])

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return block(layer, x, rope, at), None

    x, _ = lax.scan(body, x, params["blocks"])
    normed = rms_norm(x, params["final_norm"]["scale"])
    logits = jnp.einsum("BTD,VD->BTV", normed, tables["unembed"])
    losses = cross_entropy(at(logits, _BATCH, None, "tensor"), batch["targets"])
    weights = batch["weights"]
    return jnp.sum(losses * weights) / jnp.sum(weights)


def block(
    layer: Any,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    at: Callable[..., jax.Array],
) -> jax.Array:
    """One layer; `at(x, *spec)` lays activations out."""
    # B batch, T seq, D embed, K kv heads, G queries per kv head + 2, H head_dim.
    normed = at(rms_norm(x, layer["attention_norm"]["scale"]), _BATCH)
    qkv = jnp.einsum("BTD,DKGH->BTKGH", normed, layer["attention"]["qkv"])
    qkv = at(qkv, _BATCH, None, "tensor")
    mixed = at(_attention(qkv, rope), _BATCH, None, "tensor")
    x = x + at(jnp.einsum("BTNH,NHD->BTD", mixed, layer["attention"]["out"]), _BATCH)
    normed = at(rms_norm(x, layer["mlp_norm"]["scale"]), _BATCH)
    both = jnp.einsum("BTD,DPF->BTPF", normed, layer["mlp"]["gate_up"])
    both = at(both, _BATCH, None, None, "tensor")
    hidden = at(jax.nn.silu(both[:, :, 0]) * both[:, :, 1], _BATCH, None, "tensor")
    return x + at(jnp.einsum("BTF,FD->BTD", hidden, layer["mlp"]["down"]), _BATCH)


def _attention(qkv_BTKGH: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    batch, seq, kv_heads, per_group, head_dim = qkv_BTKGH.shape
    heads = kv_heads * (per_group - 2)
    q = qkv_BTKGH[:, :, :, :-2].reshape(batch, seq, heads, head_dim)
    k, v = qkv_BTKGH[:, :, :, -2], qkv_BTKGH[:, :, :, -1]
    return jax.nn.dot_product_attention(
        _rotate(q, *rope), _rotate(k, *rope), v, is_causal=True
    )


def rope_tables(seq: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position and frequency."""
    frequencies = _ROPE_THETA ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequencies.astype(
        np.float32
    )
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        (first * cos - second * sin, second * cos + first * sin), axis=-1
    )


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x` over the root of its mean square, scaled."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + _EPSILON) * scale


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of every token."""
    # Indices are compared: a gather over the split vocab dim would gather the logits.
    shifted = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    target = jnp.sum(jnp.where(hit, shifted, 0.0), axis=-1)
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - target


def _constrain(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def _is_spec(node: object) -> bool:
    return isinstance(node, P)
