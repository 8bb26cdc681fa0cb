"""A decoder with routed experts in plain JAX: every expert multiplies every token.

No module, scope or layer of meshpar: the parameters are read by name, and an expert
that a token did not choose counts 0 times.
"""

import jax
import jax.numpy as jnp
import numpy as np


def loss(config, params, bias, batch):
    """Mean loss with the auxiliary ones; assignments dropped; each layer's tokens."""
    x = params["token_embed"][batch["tokens"]]
    auxiliary, dropped, tokens = 0.0, 0, []
    attend = _latent_attention if config.kv_lora_rank else _attention
    for layer in range(config.dense_layers):
        own = jax.tree.map(lambda value, at=layer: value[at], params["dense_blocks"])
        x = x + attend(config, own["attention"], _norm(x, own["attention_norm"]))
        x = x + _mlp(own["mlp"], _norm(x, own["mlp_norm"]))
    for layer in range(config.layers - config.dense_layers):
        own = jax.tree.map(lambda value, at=layer: value[at], params["blocks"])
        x = x + attend(config, own["attention"], _norm(x, own["attention_norm"]))
        y, more, lost, used = _experts(
            config, own["mlp"], bias[layer], _norm(x, own["mlp_norm"])
        )
        x, auxiliary, dropped = x + y, auxiliary + more, dropped + lost
        tokens.append(used)
    logits = _norm(x, params["final_norm"]) @ params["unembed"].T
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits, -1), batch["targets"][..., None], -1
    )[..., 0]
    total = -(picked * batch["weights"]).sum() + auxiliary
    return total / batch["weights"].sum(), (dropped, jnp.stack(tokens))


def _norm(x, params):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["scale"]


def _mlp(params, x):
    gate, up = (x @ params["gate_up"][:, part] for part in (0, 1))
    return (jax.nn.silu(gate) * up) @ params["down"]


def _latent_attention(config, params, x):
    """DeepSeek-AI 2024, equations 1 to 11: a rotary key for all heads, no cache."""
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    rank, source = config.kv_lora_rank, x
    if config.q_lora_rank:
        source = _norm(x @ params["q_down"], params["q_norm"])
    q = jnp.einsum("btr,rnh->btnh", source, params["q"])
    down = x @ params["kv_down"]
    latent, shared = _norm(down[..., :rank], params["kv_norm"]), down[..., rank:]
    kv = jnp.einsum("btr,rnh->btnh", latent, params["kv"])
    q_rotated = _rotated(q[..., None, nope:], rope)[..., 0, :]
    k_rotated = _rotated(shared[:, :, None, None], rope)[:, :, 0, 0]
    scores = jnp.einsum("btnh,bsnh->bnts", q[..., :nope], kv[..., :nope])
    scores = scores + jnp.einsum("btnh,bsh->bnts", q_rotated, k_rotated)
    seen = np.tril(np.ones((x.shape[1], x.shape[1]), bool))
    scores = jnp.where(seen, scores / np.sqrt(nope + rope), -1e30)
    mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), kv[..., nope:])
    return jnp.einsum("btnh,nhd->btd", mixed, params["out"])


def _attention(config, params, x):
    size = config.embed // config.heads
    group = config.heads // config.kv_heads
    qkv = jnp.einsum("btd,dkgh->btkgh", x, params["qkv"])
    q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
    q, k = _rotated(q, size), _rotated(k[..., None, :], size)[..., 0, :]
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(size)
    seq = x.shape[1]
    seen = np.tril(np.ones((seq, seq), bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    mixed = jnp.einsum("bkgts,bskh->btkgh", shares, v)
    mixed = mixed.reshape(*x.shape[:2], config.heads, size)
    return jnp.einsum("btnh,nhd->btd", mixed, params["out"])


def _rotated(x, size):
    half = size // 2
    angles = np.arange(x.shape[1])[:, None] / 10_000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
    one, two = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def _experts(config, params, bias, x):
    logits = x @ params["router"]["scores"]
    scores = (
        jax.nn.sigmoid(logits) if config.score == "sigmoid" else jax.nn.softmax(logits)
    )
    ranked = jnp.argsort(-jax.lax.stop_gradient(_allowed(config, scores + bias)))
    chosen = ranked[..., : config.top_k]
    weights = jnp.take_along_axis(scores, chosen, -1)
    if config.normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    hits = jax.nn.one_hot(chosen, config.experts)  # batch, seq, choice, expert
    kept = _kept(config, hits)
    gate, up = (
        jnp.einsum("btd,edf->btef", x, params["gate_up"][:, :, part]) for part in (0, 1)
    )
    out = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, params["down"])
    weight = (weights[..., None] * hits * kept[..., None]).sum(2)
    y = config.scale * (weight[..., None] * out).sum(2)
    if config.shared_experts:
        y = y + _mlp(params["shared"], x)
    seq = x.shape[1]
    used = hits.sum((1, 2)) / (seq * config.top_k)
    mean = (scores / scores.sum(-1, keepdims=True)).mean(1)
    balance = (used * mean).sum() * config.experts * seq
    z = (jax.nn.logsumexp(logits, -1) ** 2).sum()
    auxiliary = config.balance_coefficient * balance + config.z_coefficient * z
    return y, auxiliary, (1 - kept).sum(), hits.sum((0, 1, 2))


def _allowed(config, scores):
    if config.groups == 1:
        return scores
    size = config.experts // config.groups
    grouped = scores.reshape(*scores.shape[:-1], config.groups, size)
    judged = jnp.sort(grouped, -1)[..., -2:].sum(-1)
    worst = jnp.sort(judged, -1)[..., -config.top_groups, None]
    return jnp.where((judged >= worst)[..., None], grouped, -1e30).reshape(scores.shape)


def _kept(config, hits):
    """1 where an assignment is within its expert's capacity, first choices first."""
    if not config.capacity_factor:
        return jnp.ones(hits.shape[:-1])
    batch, seq, choices, experts = hits.shape
    fair = config.capacity_factor * seq * choices / experts
    in_order = hits.transpose(0, 2, 1, 3).reshape(batch, choices * seq, experts)
    before = jnp.cumsum(in_order, 1) - in_order
    kept = ((before * in_order).sum(-1) < np.ceil(fair)).astype(jnp.float32)
    return kept.reshape(batch, choices, seq).transpose(0, 2, 1)
