"""A user's own mixture of experts, split over devices by `meshpar.experts`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar
from meshpar import Input, RuleError, from_loss, lint, make_train_step, suggest_names
from meshpar.planner.from_model import traced_workload
from tests.marks import slow

VOCAB, SEQ, EMBED, HIDDEN, EXPERTS, TOP_K, LAYERS = 32, 8, 16, 12, 4, 2, 2
INPUTS = {
    "x": Input(("batch", "seq"), "int", below=VOCAB),
    "y": Input(("batch", "seq"), "int", below=VOCAB),
}
NAMES = {
    "layers/*/gate": ("experts", "embed", "mlp"),
    "layers/*/up": ("experts", "embed", "mlp"),
    "layers/*/down": ("experts", "mlp", "embed"),
    "layers/*/bias": ("experts", "embed"),
    "**": None,
}
BATCH = {
    name: np.random.default_rng(at).integers(0, VOCAB, (8, SEQ))
    for at, name in enumerate("xy")
}
BOUND = 1e-5


def init(key):
    def normal(*shape):
        nonlocal key
        key, own = jax.random.split(key)
        return 0.3 * jax.random.normal(own, shape)

    layers = [
        {
            "router": normal(EMBED, EXPERTS),
            "gate": normal(EXPERTS, EMBED, HIDDEN),
            "up": normal(EXPERTS, EMBED, HIDDEN),
            "down": normal(EXPERTS, HIDDEN, EMBED),
            "bias": normal(EXPERTS, EMBED),
        }
        for _ in range(LAYERS)
    ]
    return {"embed": normal(VOCAB, EMBED), "layers": layers}


def gated(layer, x):
    """Mixtral's experts: the softmax of the best logits weighs gated MLPs."""
    kernels = layer["gate"], layer["up"], layer["down"]
    return meshpar.experts(x, x @ layer["router"], kernels, top_k=TOP_K)


def one_expert(kernels, rows):
    rows = rows / jnp.sqrt(jnp.mean(rows**2, axis=-1, keepdims=True))
    return jax.nn.gelu(rows @ kernels["up"]) @ kernels["down"] + kernels["bias"]


def sigmoid_choice(layer, x):
    weights, chosen = jax.lax.top_k(jax.nn.sigmoid(x @ layer["router"]), TOP_K)
    return chosen, weights


def own(layer, x):
    """A router and experts of one's own."""
    kernels = {name: layer[name] for name in ("up", "down", "bias")}
    return meshpar.experts(x, sigmoid_choice(layer, x), kernels, function=one_expert)


def all_experts(layer, x, choose, expert):
    """Every expert of every token."""
    chosen, weights = choose(layer, x)
    kernels = {name: layer[name] for name in ("gate", "up", "down", "bias")}
    rows = x.reshape(-1, EMBED)
    y = jax.vmap(lambda kernels: expert(kernels, rows))(kernels)
    hits = weights[..., None] * (chosen[..., None] == jnp.arange(EXPERTS))
    return jnp.einsum("bske,ebsd->bsd", hits, y.reshape(EXPERTS, *x.shape))


def softmax_choice(layer, x):
    logits, chosen = jax.lax.top_k(x @ layer["router"], TOP_K)
    return chosen, jax.nn.softmax(logits)


def one_gated(kernels, rows):
    hidden = jax.nn.silu(rows @ kernels["gate"]) * (rows @ kernels["up"])
    return hidden @ kernels["down"]


PLAIN = {
    gated: functools.partial(all_experts, choose=softmax_choice, expert=one_gated),
    own: functools.partial(all_experts, choose=sigmoid_choice, expert=one_expert),
}


def run(params, batch, key, experts):
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = x + experts(layer, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["embed"].T, batch["y"]
    )
    return losses.sum(), jnp.float32(losses.size)


def model(experts, blocks=None, names=NAMES):
    loss = functools.partial(run, experts=experts)
    return from_loss(init, loss, names=names, blocks=blocks, inputs=INPUTS)


@functools.cache
def plain_program(experts, steps=2):
    """Losses and parameters of a plain program on one device."""

    def mean(params):
        loss_sum, weight_sum = run(params, BATCH, None, PLAIN[experts])
        return loss_sum / weight_sum

    step, losses = jax.jit(jax.value_and_grad(mean)), []
    params = jax.jit(init)(jax.random.key(0))
    for _ in range(steps):
        loss, gradients = step(params)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize(
    ("layout", "experts", "blocks"),
    [
        slow("data=2,expert=2", gated, None),
        slow("data=2,expert=4", gated, None),
        slow("data=2,expert=2,tensor=2", own, None),
        slow("data=1", gated, None),
        slow("data=1", own, None),
        slow("expert=4", own, None),
        slow("fsdp=2,expert=4", gated, "layers"),
        slow("fsdp=2,expert=2,tensor=2,zero=3", gated, None),
        slow("expert=2,stage=2,tensor=2,microbatches=2", gated, "layers"),
        slow("expert=4,stage=2,microbatches=2", own, "layers"),
        slow("context=2,expert=2,data=2", gated, None),
    ],
)
def test_own_experts_train_under_any_layout_as_on_one_device(layout, experts, blocks):
    losses, wanted = plain_program(experts)
    step = make_train_step(
        model(experts, blocks),
        optax.sgd(0.5),
        layout,
        devices=jax.devices()[: meshpar.Layout.parse(layout).num_devices],
    )
    state, found = step.init(seed=0), []
    for _ in losses:
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=BOUND)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=BOUND),
        step.unflatten(state),
        wanted,
    )


@pytest.mark.parametrize("blocks", [None, "layers"])
def test_experts_that_get_no_tokens_are_pointed_to_the_drop_in(blocks, refuses):
    plain = model(PLAIN[gated], blocks)
    with refuses("model.experts_without_tokens", "meshpar.experts", kind=RuleError):
        make_train_step(plain, optax.sgd(0.5), "data=2,expert=4")
    unnamed = model(PLAIN[gated], blocks, {"**": None})
    with refuses("layout.expert_without_experts", "meshpar.experts", kind=RuleError):
        make_train_step(unnamed, optax.sgd(0.5), "data=2,expert=4")
    assert lint(model(gated, blocks), "data=2,expert=4", seq=SEQ).findings == ()


@pytest.mark.parametrize(("experts", "first"), [(gated, "down"), (own, "bias")])
def test_experts_without_a_name_beside_named_ones_are_refused(experts, first, refuses):
    of_first = {pattern.replace("*/", "0/"): axes for pattern, axes in NAMES.items()}
    partly = model(experts, names=of_first)
    refused = "model.experts_without_name", f"layers.1.{first}", EXPERTS
    with refuses(*refused, kind=RuleError):
        make_train_step(partly, optax.sgd(0.5), "data=2,expert=4")
    found = lint(partly, "data=2,expert=4", seq=SEQ).findings
    assert [one.key for one in found] == ["model.experts_without_name"]


@pytest.mark.parametrize(
    ("experts", "kernels"),
    [slow(gated, ("gate", "up", "down")), (own, ("up", "down"))],
)
def test_names_are_suggested_for_kernels_of_experts(experts, kernels):
    suggested = suggest_names(model(experts, "layers", {}), seq=SEQ)
    for kernel in kernels:
        assert suggested[f"**/{kernel}"] == NAMES[f"layers/*/{kernel}"]
    named = model(experts, "layers", suggested)
    assert lint(named, "expert=2,tensor=2,data=2", seq=SEQ).findings == ()


@pytest.mark.parametrize(("experts", "kernels"), [slow(gated, 3), (own, 2)])
def test_a_plan_counts_the_experts_that_a_token_meets(experts, kernels):
    workload = traced_workload(model(experts, "layers"), seq=SEQ)
    weights = EMBED * EXPERTS + TOP_K * kernels * EMBED * HIDDEN
    assert workload.traced.linear_flops == 2 * weights
    assert workload.traced.mixing_flops == 0


def test_an_expert_that_a_token_chooses_twice_counts_twice():
    chosen = np.array([[0, 1, 1]] * 3), np.ones((3, 3))

    @jax.jit
    def results(kernels, x):
        y = meshpar.experts(x, chosen, kernels, function=jnp.multiply)
        return y, x * kernels[0] + 2 * x * kernels[1]

    given = np.random.default_rng(0).normal(size=(2, EMBED)), np.ones((3, EMBED))
    np.testing.assert_allclose(*results(*given), rtol=BOUND)


KERNELS = jnp.ones((4, 3, 5)), jnp.ones((4, 3, 5)), jnp.ones((4, 5, 3))
X, LOGITS = jnp.ones((2, 3)), jnp.ones((2, 4))
CHOSEN = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))


@pytest.mark.parametrize(
    ("given", "options", "refusal"),
    [
        (
            (X, LOGITS, KERNELS[:2]),
            {"top_k": 1},
            ("model.wrong_expert_kernels", 3, 5),
        ),
        (
            (X, LOGITS, (*KERNELS[:2], KERNELS[2][:3])),
            {"top_k": 1},
            ("model.wrong_expert_kernels", 4, 3),
        ),
        ((X, LOGITS, KERNELS), {}, ("model.wrong_expert_choices", "top_k=None")),
        (
            (X, CHOSEN, KERNELS),
            {"top_k": 1},
            ("model.wrong_expert_choices", "tuple", "top_k=1"),
        ),
        (
            (X[0], CHOSEN, KERNELS),
            {},
            ("model.wrong_expert_choices", "(2, 1)", "(3,)"),
        ),
        (
            (X, LOGITS[:, 1:], KERNELS),
            {"top_k": 1},
            ("model.wrong_number_of_experts", 4, 3),
        ),
        (
            (X, CHOSEN, KERNELS),
            {"function": lambda kernels, rows: rows @ kernels[0]},
            ("model.wrong_expert_result", "(2, 5)", "(2, 3)"),
        ),
    ],
)
def test_what_experts_cannot_take_is_refused(given, options, refusal, refuses):
    with refuses(*refusal):
        meshpar.experts(*given, **options)


def test_an_array_whose_gradient_would_be_lost_is_refused(refuses):
    @jax.grad
    def summed_results(scale):
        kernels = {"up": KERNELS[0], "down": KERNELS[2]}

        def function(kernels, rows):
            return rows @ kernels["up"] @ kernels["down"] * scale

        return meshpar.experts(X, CHOSEN, kernels, function=function).sum()

    with refuses("model.expert_reads_array", "(3,)"):
        summed_results(jnp.ones(3))
