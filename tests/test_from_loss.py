"""Models as people have them: a function that makes parameters, and a loss."""

import functools
import importlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar import Input, from_loss, lint, make_train_step, suggest_names
from meshpar.model import tracing
from meshpar.model.loss.leaf_names import UnmatchedNameWarning
from meshpar.model.parameter import initial_values
from meshpar.model.scope import Scope
from meshpar.models.presets import build
from meshpar.planner.from_model import traced_workload
from meshpar.testing.assertions import assert_no_surprises
from meshpar.testing.batches import random_batch
from meshpar.testing.equivalence import check_layouts
from meshpar.train.checkpoint import Checkpoints
from recipes.examples.__main__ import (
    EXAMPLES,
    added_lines,
    layout_losses,
    main,
    plain_losses,
)
from tests.costs import COMPILING
from tests.marks import slow
from tests.test_zoo import ZOO

BOUND = 1e-5
LAYERS, EMBED, VOCAB, SEQ = 3, 8, 11, 8
TOKENS = {name: Input(("batch", "seq"), "int", below=VOCAB) for name in ("x", "y")}
WHOLE = ("data=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2,microbatches=2")
STAGES = "data=2,stage=2,tensor=2,microbatches=2"
NAMES = {
    "**/up": ("embed", "mlp"),
    "**/down": ("mlp", "embed"),
    "embed": (None, "embed"),
    "out": ("embed", None),
}


def example(name):
    return importlib.import_module(f"recipes.examples.{name}")


@functools.cache
def reference(name):
    return plain_losses(example(name))


OWN_CONTRACT = {"running_mean", "batch_norm", "denoising", "dit", "dlrm"}
"""Models of the zoo that change state, or need keys by example or input gradients."""
MICROBATCHES = {name for name in EXAMPLES if name != "resnet_nnx"}
"""Examples that keep no statistics of the whole batch."""
QUICKLY = {"nanogpt_nnx", "gpt2_linen", "resnet_nnx"}
"""Examples whose initial values are not left to `make test-full`."""


@pytest.mark.parametrize(
    ("name", "layout", "blocks"),
    [
        ("nanogpt_nnx", "data=2,fsdp=2,tensor=2", True),
        slow("mixer_equinox", "stage=2,data=4", True),
        *(
            slow(name, layout, blocks)
            for name in EXAMPLES
            for layout, blocks in [
                *((layout, False) for layout in WHOLE),
                ("fsdp=4,tensor=2,remat=full", name in MICROBATCHES),
                (STAGES, True),
            ]
            if name in MICROBATCHES or "microbatches" not in layout
        ),
    ],
)
def test_models_of_every_library_train_as_their_plain_programs(name, layout, blocks):
    losses = layout_losses(example(name), layout, blocks)
    np.testing.assert_allclose(losses, reference(name), rtol=BOUND)


@pytest.mark.parametrize(
    "name", [name if name in QUICKLY else slow(name) for name in EXAMPLES]
)
def test_initial_values_are_those_of_init(name):
    module = example(name)
    model = module.model(module.BLOCKS)
    params, state = jax.jit(functools.partial(initial_values, model))(3)
    ours = jax.tree.leaves(_arrays(model.unflatten(params, state)))
    theirs = jax.tree.leaves(_arrays(jax.jit(_made(module))(jax.random.key(3))))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def _made(module):
    return lambda key: _arrays(module.init(key))


def _arrays(tree):
    if isinstance(tree, nnx.Module):
        return nnx.to_pure_dict(nnx.state(tree, nnx.Param))
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_few_lines_are_for_meshpar(name):
    assert added_lines(example(name), with_blocks=False) <= 5
    assert added_lines(example(name), with_blocks=True) <= 10


def test_the_examples_print_both_programs(monkeypatch, capsys):
    monkeypatch.setattr(
        "recipes.examples.__main__.layout_losses", lambda *_: [1.5, 1.25]
    )
    monkeypatch.setattr("recipes.examples.__main__.plain_losses", lambda _: [1.5])
    main(["nanogpt_nnx", "data=8", "--blocks"])
    printed = capsys.readouterr().out
    assert re.search(r"^data=8 +1.500000 1.250000$", printed, re.M)
    assert re.search(r"^plain program +1.500000$", printed, re.M)


def normal(key, *shape):
    return jax.random.normal(key, shape) * 0.3


def init_listed(key, num_layers=LAYERS):
    keys = jax.random.split(key, 2 + 2 * num_layers)
    layers = [
        {
            "up": normal(keys[2 * at], EMBED, 16),
            "down": normal(keys[2 * at + 1], 16, EMBED),
        }
        for at in range(num_layers)
    ]
    ends = {
        "embed": normal(keys[-1], VOCAB, EMBED),
        "out": normal(keys[-2], EMBED, VOCAB),
    }
    return {**ends, "layers": layers}


def init_deep(key):
    return init_listed(key, num_layers=5)


def init_stacked(key):
    params = init_listed(key)
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *params["layers"])
    return {**params, "layers": stacked}


def normed(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(x, layer, mask=None):
    """A block without parameters in its norm: it seems the end of the last one."""
    h = jax.nn.silu(normed(x) @ layer["up"]) @ layer["down"]
    return x + (h if mask is None else jnp.where(mask, h, 0))


def cross_entropy(params, x, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        normed(x) @ params["out"], batch["y"]
    )
    return losses.sum(), jnp.float32(losses.size)


def run_list(params, batch, key):
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = block(x, layer)
    return cross_entropy(params, x, batch)


def run_flat(params, batch, key):
    """Tokens of all examples in one dim between the blocks."""
    x = params["embed"][batch["x"]].reshape(-1, EMBED)
    for layer in params["layers"]:
        x = block(x, layer)
    x = x.reshape(*batch["x"].shape, EMBED)
    return cross_entropy(params, x, batch)


def run_mask(params, batch, key):
    """Every block reads a mask that depends on the batch alone."""
    x, mask = params["embed"][batch["x"]], (batch["x"] > 2)[..., None]
    for layer in params["layers"]:
        x = block(x, layer, mask & (batch["y"] != 3)[..., None])
    return cross_entropy(params, x, batch)


def run_beside(params, batch, key):
    """The embedding flows beside the stream, and a table that all examples share."""
    first, table = params["embed"][batch["x"]], params["out"].sum(axis=1)
    x = first
    for layer in params["layers"]:
        x = block(x, layer) + 0.1 * first * table
    return cross_entropy(params, x, batch)


@jax.jit
def run_scan(params, batch, key):
    body = jax.checkpoint(lambda x, layer: (block(x, layer), None))
    x, _ = jax.lax.scan(body, params["embed"][batch["x"]], params["layers"])
    return cross_entropy(params, x, batch)


def run_scan_beside(params, batch, key):
    first, mask = params["embed"][batch["x"]], (batch["x"] > 2)[..., None]
    scales = 1 / (1 + jnp.arange(LAYERS))

    def body(x, layer_and_scale):
        layer, scale = layer_and_scale
        return block(x, layer, mask) + scale * first, None

    layers = jax.tree.map(lambda x: x.astype(jnp.float32), params["layers"])
    x, _ = jax.lax.scan(body, first, (layers, scales))
    return cross_entropy(params, x, batch)


def tokens(examples=4):
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, VOCAB, (examples, SEQ)) for name in ("x", "y")}


LISTED = (run_list, run_flat, run_mask, run_beside)
STACKED = (run_scan, run_scan_beside)
BOTH = [
    *((init_listed, loss) for loss in LISTED),
    *((init_stacked, loss) for loss in STACKED),
]


def init_two_kinds(key):
    """Two layers that read what three others return."""
    return {**init_listed(key), "readers": init_listed(key, num_layers=2)["layers"]}


def init_two_stacked(key):
    params = init_two_kinds(key)
    kinds = ("layers", "readers")
    stacks = [
        jax.tree.map(lambda *one: jnp.stack(one), *params[kind]) for kind in kinds
    ]
    return {**params, **dict(zip(kinds, stacks, strict=True))}


def run_readers(params, batch, key):
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = block(x, layer)
    memory, y = normed(x), params["embed"][batch["y"]]
    for layer in params["readers"]:
        y = block(y + memory @ layer["up"] @ layer["down"], layer)
    return cross_entropy(params, y, batch)


def scan_readers(params, batch, key):
    body = lambda x, layer: (block(x, layer), None)  # noqa: E731
    x, _ = jax.lax.scan(body, params["embed"][batch["x"]], params["layers"])
    scales = 1 / (1 + jnp.arange(2))

    def read(y, layer_and_scale):
        layer, scale = layer_and_scale
        return block(y + scale * normed(x), layer), None

    first = params["embed"][batch["y"]]
    y, _ = jax.lax.scan(read, first, (params["readers"], scales))
    return cross_entropy(params, y, batch)


def init_u(key):
    """A coarse level of one kind, between two of another."""
    params = init_two_kinds(key)
    return {**params, "up": init_listed(jax.random.fold_in(key, 1), 2)["layers"]}


def run_u(params, batch, key):
    """Return a loss whose second blocks and end read the result of its first blocks."""
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = block(x, layer)
    fine, x = x, x.reshape(len(x), SEQ // 2, 2, EMBED).mean(axis=2)
    for layer in params["readers"]:
        x = block(x, layer)
    x = fine + jnp.repeat(x, 2, axis=1)
    for layer in params["up"]:
        x = block(x, layer)
    return cross_entropy(params, x + jnp.sin(fine), batch)


KINDS = ("layers", "readers")
TWO_KINDS = [(init_two_kinds, run_readers), (init_two_stacked, scan_readers)]


@pytest.mark.parametrize(
    ("init", "loss", "blocks"),
    [
        *((*one, "layers") for one in BOTH),
        *((*one, KINDS) for one in TWO_KINDS),
        (init_u, run_u, (*KINDS, "up")),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_embed_block_and_head_of_a_cut_loss_are_the_loss(init, loss, blocks):
    model = from_loss(init, loss, names=NAMES, blocks=blocks, inputs=TOKENS)
    assert model.groups[0].num_layers == LAYERS
    params, batch = model.init(0), tokens()

    def plain(params):
        loss_sum, weight_sum = loss(params, batch, None)
        return loss_sum / weight_sum

    whole = model.unflatten(params)
    expected, gradients = jax.jit(jax.value_and_grad(plain))(whole)
    found, ours = jax.jit(
        jax.value_and_grad(lambda params: tracing.loss(model, params, batch))
    )(params)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, other in zip(
        jax.tree.leaves(model.unflatten(ours)), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "loss", "blocks"),
    [*((*one, KINDS) for one in TWO_KINDS), (init_u, run_u, (*KINDS, "up"))],
)
@pytest.mark.parametrize("layout", [STAGES, "fsdp=4,tensor=2,remat=full"])
def test_blocks_of_several_kinds_train_as_their_plain_program(
    init, loss, blocks, layout
):
    model = from_loss(init, loss, names=NAMES, blocks=blocks, inputs=TOKENS)
    step, batch = make_train_step(model, optax.sgd(0.1), layout), tokens(8)

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        loss_sum, weight_sum = loss(params, batch, None)
        return loss_sum / weight_sum

    state, losses = step.init(seed=0), []
    params = jax.jit(init)(jax.random.key(0))
    for _ in range(2):
        state, metrics = step(state, batch)
        value, gradients = plain(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append((float(metrics["loss"]), float(value)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=BOUND)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        step.unflatten(state),
        params,
    )


def test_groups_of_blocks_have_names_of_their_own(refuses):
    def init(key):
        sides = {side: {"layers": init_listed(key)["layers"]} for side in "ab"}
        return {**sides, "embed": jnp.ones((VOCAB, EMBED))}

    model = from_loss(init, run_list, blocks=("a/layers", "b/layers"))
    assert [group.name for group in model.groups] == ["a_layers", "b_layers"]
    with refuses("model.blocks_overlap", "layers.0.down"):
        from_loss(init_listed, run_list, blocks=("layers", "layers"))
    with refuses("model.no_such_blocks", "blocks=()"):
        from_loss(init_listed, run_list, blocks=())
    late = from_loss(init_two_kinds, run_readers, blocks=KINDS[::-1], inputs=TOKENS)
    with refuses("model.blocks_leak", "readers", "order in which they run"):
        jax.eval_shape(
            lambda params: tracing.loss(late, params, tokens()), _shapes(late)
        )


def skips(params, batch, key):
    x = [params["embed"][batch["x"]]]
    for layer in params["layers"]:
        x.append(
            block(x[-1], layer)
            + (x[-3] @ layer["up"] @ layer["down"] if len(x) > 2 else 0)
        )
    return cross_entropy(params, x[-1], batch)


def keeps_to_itself(params, batch, key):
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        h = x @ layer["up"]
        x = x + h @ layer["down"]
    loss_sum, weight_sum = cross_entropy(params, x, batch)
    return loss_sum + (h * h).sum(), weight_sum


def differs(params, batch, key):
    x = params["embed"][batch["x"]]
    for at, layer in enumerate(params["layers"]):
        x = block(x, layer) * (1.0 if at else 0.5)
    return cross_entropy(params, x, batch)


def leaves_one_out(params, batch, key):
    x = params["embed"][batch["x"]]
    for layer in params["layers"][1:]:
        x = block(x, layer)
    return cross_entropy(params, x, batch)


def loops_in_python(params, batch, key):
    x = params["embed"][batch["x"]]
    for at in range(LAYERS):
        x = block(x, jax.tree.map(lambda p, at=at: p[at], params["layers"]))
    return cross_entropy(params, x, batch)


def scans_twice(params, batch, key):
    half = jax.tree.map(lambda p: p[:2], params["layers"])
    body = lambda x, layer: (block(x, layer), None)  # noqa: E731
    x, _ = jax.lax.scan(body, params["embed"][batch["x"]], half)
    return cross_entropy(params, x, batch)


def scans_backwards(params, batch, key):
    body = lambda x, layer: (block(x, layer), None)  # noqa: E731
    first = params["embed"][batch["x"]]
    x, _ = jax.lax.scan(body, first, params["layers"], reverse=True)
    return cross_entropy(params, x, batch)


def gives_every_layer(params, batch, key):
    def body(x, layer):
        x = block(x, layer)
        return x, x

    x, every = jax.lax.scan(body, params["embed"][batch["x"]], params["layers"])
    return cross_entropy(params, x + every.mean(axis=0), batch)


@pytest.mark.parametrize(
    ("init", "loss", "key"),
    [
        (init_deep, skips, "model.blocks_skip"),
        (init_listed, keeps_to_itself, "model.blocks_leak"),
        (init_listed, differs, "model.blocks_differ"),
        (init_listed, leaves_one_out, "model.blocks_not_used"),
        (init_stacked, loops_in_python, "model.blocks_not_scanned"),
        (init_stacked, scans_twice, "model.blocks_not_scanned"),
        (init_stacked, scans_backwards, "model.blocks_scan_reversed"),
        (init_stacked, gives_every_layer, "model.blocks_leak"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_loss_without_equal_blocks_one_after_another_is_refused(
    init, loss, key, refuses
):
    model = from_loss(init, loss, names=NAMES, blocks="layers", inputs=TOKENS)
    with refuses(key, "layers", words=False):
        jax.eval_shape(
            lambda params: tracing.loss(model, params, tokens()), _shapes(model)
        )


def _shapes(model):
    return jax.eval_shape(lambda: model.init(0))


def by_gradient(at):
    """A function with the same values in every layer, and another derivative."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * (1 + at),))
    return sine


def by_constant(at):
    inner = jax.jit(lambda x: x * np.arange(float(EMBED)) * (1 + at))
    return jax.checkpoint(lambda x: inner(x))


def by_callback(at):
    function = (np.sin, np.cos)[at % 2]
    return lambda x: jax.pure_callback(lambda y: function(y), x, x)


@pytest.mark.parametrize("function", [by_gradient, by_constant, by_callback])
def test_blocks_that_differ_inside_a_call_are_refused(function, refuses):
    def loss(params, batch, key):
        x = params["embed"][batch["x"]]
        for at, layer in enumerate(params["layers"]):
            x = block(x, layer) + function(at)(x)
        return cross_entropy(params, x, batch)

    model = from_loss(init_listed, loss, names=NAMES, blocks="layers", inputs=TOKENS)
    with refuses("model.blocks_differ", "layers", words=False):
        jax.eval_shape(
            lambda params: tracing.loss(model, params, tokens()), _shapes(model)
        )


def test_a_function_that_all_blocks_share_is_no_difference():
    sine = by_gradient(0)

    def loss(params, batch, key):
        x = params["embed"][batch["x"]]
        for layer in params["layers"]:
            x = block(sine(jax.nn.relu(x)), layer)
        return cross_entropy(params, x, batch)

    model = from_loss(init_listed, loss, names=NAMES, blocks="layers", inputs=TOKENS)
    jax.eval_shape(lambda params: tracing.loss(model, params, tokens()), _shapes(model))


def test_blocks_that_are_not_there_are_refused(refuses):
    with refuses("model.no_such_blocks", "layer", "layers"):
        from_loss(init_listed, run_list, blocks="layer", inputs=TOKENS)
    with refuses("model.blocks_not_stacked", "embed"):
        from_loss(
            lambda key: {"embed": {"a": jnp.ones(2), "b": jnp.ones(3)}},
            run_list,
            blocks="embed",
        )
    unlike = {"layers": [{"up": jnp.ones((2, 2))}, {"up": jnp.ones((2, 3))}]}
    with refuses("model.blocks_differ", 0, 1, "up"):
        from_loss(lambda key: unlike, run_list, blocks="layers")


def test_wrong_arguments_are_refused(refuses):
    rows = {"rows": Input(("batch", "embed"), has_gradient=True)}
    with refuses("model.input_gradient_in_loss", "rows"):
        from_loss(init_listed, run_list, inputs=rows)
    with refuses("model.init_not_callable", "dict"):
        from_loss({"w": jnp.ones(2)}, run_list)
    with refuses("model.loss_not_callable", "str"):
        from_loss(init_listed, "loss")
    with refuses("model.no_parameters"):
        from_loss(lambda key: {"table": jnp.arange(3)}, run_list)
    with refuses("model.wrong_number_of_names", "**/up", 3, 2):
        names = {"**/up": ("embed", "mlp", None)}
        from_loss(init_listed, run_list, names=names, inputs=TOKENS)


class Normed(nnx.Module):
    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.read = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.layers = nnx.List([nnx.BatchNorm(4, rngs=rngs) for _ in range(2)])


def squared_errors(module, batch, key):
    y = module.norm(module.read(batch["x"]))
    errors = (y[:, 0] - batch["y"]) ** 2
    return errors.sum(), jnp.float32(errors.size), {"error": jnp.abs(errors).sum()}


VECTORS = {"x": Input(("batch", None), shape=(None, 4)), "y": Input(("batch",))}


def test_batch_norm_has_the_statistics_of_the_global_batch(refuses):
    model = from_loss(Normed, squared_errors, inputs=VECTORS)
    rng = np.random.default_rng(0)
    batch = {"x": rng.random((8, 4), np.float32), "y": rng.random(8, np.float32)}
    step = make_train_step(
        model, optax.sgd(0.0), "data=2,fsdp=2", devices=jax.devices()[:4]
    )
    state = step.init(seed=0)
    for _ in range(2):
        state, metrics = step(state, batch)

    @jax.jit
    def plain():
        module = Normed(jax.random.key(0))
        for _ in range(2):
            error, *_ = squared_errors(module, batch, None)
        return error / 8, module.norm.mean[...], module.norm.var[...]

    error, mean, var = plain()
    np.testing.assert_allclose(metrics["error"], error, rtol=BOUND)
    np.testing.assert_allclose(metrics["loss"], error, rtol=BOUND)
    norm = state.model_state["norm"]
    np.testing.assert_allclose(norm["mean"], mean, rtol=BOUND)
    np.testing.assert_allclose(norm["var"], var, rtol=BOUND)
    many = make_train_step(
        model, optax.sgd(0.0), "data=4,microbatches=2", devices=jax.devices()[:4]
    )
    with refuses("model.batch_norm_in_microbatches", 2):
        many.compile(batch)


def test_batch_norm_in_blocks_is_refused(refuses):
    model = from_loss(Normed, squared_errors, inputs=VECTORS, blocks="layers")
    params, state = jax.eval_shape(lambda: initial_values(model, 0))
    batch = {name: np.ones((4, 4)[: 2 - (name == "y")]) for name in VECTORS}
    scope = Scope(training=True, state=state, batch=batch)
    with refuses("model.batch_norm_in_blocks", "layers"):
        jax.eval_shape(lambda params: model.embed(params, batch, scope), params)


def test_collections_of_linen_that_are_not_trained_are_told():
    def loss(variables, batch, key):
        return (batch["x"] @ variables["params"]["w"]).sum(), jnp.float32(1)

    def variables(key):
        params, statistics = {"w": jnp.ones((4, 4))}, {"mean": jnp.zeros(4)}
        return {"params": params, "batch_stats": statistics}

    linen = from_loss(variables, loss, inputs=VECTORS)
    assert list(linen.flat_parameters()) == ["params.w"]
    assert "stays as init makes it" in linen.name_problems["batch_stats"]


def test_patterns_and_parameters_without_a_match_are_findings():
    names = {"**/up": ("embed", "mlp"), "**/qkv": ("embed", None)}
    with pytest.warns(UnmatchedNameWarning, match=r"\*\*/qkv"):
        model = from_loss(init_listed, run_list, names=names, inputs=TOKENS)
    found = [
        one.path
        for one in lint(model, "tensor=2", seq=SEQ).findings
        if one.key == "model.unmatched_name"
    ]
    assert found == ["names['**/qkv']", "names"]
    assert model.name_problems["names"].startswith(
        "no pattern matches embed, layers.*.down, out"
    )
    whole = from_loss(init_listed, run_list, names={"**": None}, inputs=TOKENS)
    assert whole.name_problems == {}


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("layers/0/up", ["layers.0.up"]),
        ("layers.0.up", ["layers.0.up"]),
        ("layers/*/up", [f"layers.{at}.up" for at in range(LAYERS)]),
        ("**/up", [f"layers.{at}.up" for at in range(LAYERS)]),
        ("**/0/**", ["layers.0.down", "layers.0.up"]),
        ("**/u*", [f"layers.{at}.up" for at in range(LAYERS)]),
        ("up", []),
    ],
)
def test_a_pattern_matches_whole_keys_of_a_path(pattern, matches):
    with warnings.catch_warnings(action="ignore"):
        names = {pattern: ("a", "b")}
        model = from_loss(init_listed, run_list, names=names, inputs=TOKENS)
    found = [
        path
        for path, one in model.flat_parameters().items()
        if one.logical_axes == ("a", "b")
    ]
    assert found == matches


def test_the_first_pattern_that_matches_counts_before_the_modules_own_names():
    def init(key):
        rngs = nnx.Rngs(key)
        axes = {"out_sharding": ("embed", "mlp")}
        return {
            "one": nnx.Linear(2, 2, kernel_metadata=axes, rngs=rngs),
            "two": nnx.Linear(2, 2, kernel_metadata=axes, rngs=rngs),
        }

    names = {"one/kernel": ("heads", "embed"), "*/bias": (None,)}
    model = from_loss(init, run_list, names={**names, "**/kernel": ("a", "b")})
    found = {path: one.logical_axes for path, one in model.flat_parameters().items()}
    assert found["one.kernel"] == ("heads", "embed")
    assert found["two.kernel"] == ("a", "b")
    own = from_loss(init, run_list).flat_parameters()
    assert own["two.kernel"].logical_axes == ("embed", "mlp")


@pytest.mark.parametrize("names", [("embed", "mlp"), (None, "embed", "mlp")])
def test_names_may_leave_out_the_dim_of_stacked_layers(names, refuses):
    names = {"layers/up": names, "**": None}
    stacked = from_loss(init_stacked, run_scan, names=names, blocks="layers")
    assert stacked.flat_parameters()["layers.up"].logical_axes == ("embed", "mlp")
    with refuses("model.wrong_number_of_names", 3, 2):
        names = {"layers/up": ("embed", "embed", "mlp"), "**": None}
        from_loss(init_stacked, run_scan, names=names, blocks="layers")


def run_dropout(params, batch, key):
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        if key is not None:
            key, own = jax.random.split(key)
            x = jnp.where(jax.random.bernoulli(own, 0.5, x.shape), 2 * x, 0)
        x = block(x, layer)
    return cross_entropy(params, x, batch)


@pytest.mark.parametrize("blocks", [None, "layers"])
def test_dropout_draws_for_each_example(blocks):
    model = from_loss(
        init_listed, run_dropout, names=NAMES, blocks=blocks, inputs=TOKENS
    )
    params, batch = model.init(0), tokens(8)

    @jax.jit
    def losses(batch, examples):
        key = jax.random.key(1)
        scope = Scope(training=True, random=key, examples=examples, batch=batch)
        return tracing.loss(model, params, batch, scope)

    def part(begin, end, first=0):
        chosen = {name: value[begin:end] for name, value in batch.items()}
        return losses(chosen, first + jnp.arange(begin, end, dtype=jnp.uint32))

    halves = (part(0, 4) + part(4, 8)) / 2
    np.testing.assert_allclose(halves, part(0, 8), rtol=1e-5)
    assert abs(float(part(0, 8, first=8) - part(0, 8))) > 1e-3
    assert abs(float(tracing.loss(model, params, batch) - part(0, 8))) > 1e-3


def test_a_mask_that_all_examples_share_is_drawn_once(refuses):
    """Also where a device has one example, whose own arrays look alike."""

    def loss(params, batch, key):
        x = params["embed"][batch["x"]]
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.5, (1, 1, EMBED))
        return cross_entropy(params, x, batch)

    model = from_loss(init_listed, loss, names=NAMES, inputs=TOKENS)
    params, batch = model.init(0), tokens(4)

    def losses(first, last, loss=model):
        rows = {name: value[first:last] for name, value in batch.items()}
        examples = jnp.arange(first, last, dtype=jnp.uint32)
        scope = Scope(training=True, random=jax.random.key(1), examples=examples)
        return tracing.loss(loss, params, rows, scope)

    each = np.mean([losses(at, at + 1) for at in range(4)])
    np.testing.assert_allclose(each, losses(0, 4), rtol=1e-5)

    def both(params, batch, key):
        if key is not None:
            shape = (len(batch["x"]), 1, EMBED)
            drawn = [jax.random.normal(key, one) for one in (shape, (1, 1, EMBED))]
            batch = {**batch, "noise": sum(drawn)}
        return loss(params, batch, key)

    mixed = from_loss(init_listed, both, names=NAMES, inputs=TOKENS)
    with refuses("model.ambiguous_draw", 1):
        losses(0, 1, mixed)


def test_parameters_come_back_as_the_tree_of_init_from_any_layout(refuses):
    layout = "stage=2,chunks=2,microbatches=2,schedule=interleaved_1f1b"
    model = from_loss(
        functools.partial(init_listed, num_layers=4),
        run_list,
        names=NAMES,
        blocks="layers",
        inputs=TOKENS,
    )
    step = make_train_step(model, optax.sgd(0.1), layout, devices=jax.devices()[:2])
    found = step.unflatten(step.init(seed=0))
    expected = jax.jit(functools.partial(init_listed, num_layers=4))(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    normed = from_loss(Normed, squared_errors, inputs=VECTORS)
    with refuses("model.tree_needs_state", "state.model_state"):
        normed.unflatten(normed.parameters)


def test_what_would_be_trained_or_left_out_unseen_is_refused_or_reported(refuses):
    def init(key):
        variables = {"params": {"w": jnp.ones(4)}, "batch_stats": {"m": jnp.ones(4)}}
        return {"one": variables, "scale": 2.0}

    model = from_loss(init, squared_errors, inputs=VECTORS)
    assert list(model.flat_parameters()) == ["one.params.w"]
    assert {*model.name_problems} == {"batch_stats", "scale"}
    with refuses("model.variables_without_module", "nnx.state"):
        from_loss(lambda key: nnx.state(Normed(key)), squared_errors, inputs=VECTORS)

    def tied(key):
        one, other = Normed(key), Normed(key)
        other.read = one.read
        return {"one": one, "other": other}

    with refuses("model.shared_variable"):
        from_loss(tied, squared_errors, inputs=VECTORS)


def test_a_tree_that_is_one_array_trains():
    def loss(weight, batch, key):
        errors = (batch["x"] @ weight - batch["y"]) ** 2
        return errors.sum(), jnp.float32(errors.size)

    model = from_loss(lambda key: jnp.ones(4), loss, inputs=VECTORS)
    assert list(model.flat_parameters()) == ["value"]
    batch = {"x": np.ones((2, 4), np.float32), "y": np.zeros(2, np.float32)}
    assert float(tracing.loss(model, model.init(0), batch)) == 16


def test_stages_and_plans_ask_for_blocks(refuses):
    model = from_loss(init_listed, run_list, names=NAMES, inputs=TOKENS)
    with refuses("model.no_blocks_for_stages", 2, "blocks"):
        make_train_step(model, optax.sgd(0.1), "stage=2,data=4")
    with refuses("model.no_blocks_to_plan", "blocks"):
        traced_workload(model, seq=SEQ)
    keys = [one.key for one in lint(model, "stage=2,data=4", seq=SEQ).findings]
    assert keys == ["model.no_blocks_for_stages"]


def run_attention(params, batch, key, attend=meshpar.attend, places=meshpar.positions):
    """Attention between blocks' matmuls, and a term that depends on the place."""
    at = places(batch["x"].shape[1]).astype(jnp.float32)
    x = params["embed"][batch["x"]] + 0.1 * jnp.sin(at)[None, :, None]
    for layer in params["layers"]:
        q = k = v = x.reshape(*x.shape[:2], 2, EMBED // 2)
        x = block(x + attend(q, k, v, causal=True).reshape(x.shape), layer)
    return cross_entropy(params, x, batch)


def plain_attend(q, k, v, causal):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [("data=2,context=2", None), slow("context=2,stage=2,microbatches=2", "layers")],
)
def test_attend_and_positions_follow_a_split_sequence(layout, blocks, refuses):
    batch = tokens(8)

    def plain(params):
        plain = functools.partial(run_attention, attend=plain_attend, places=jnp.arange)
        loss_sum, weight_sum = plain(params, batch, None)
        return loss_sum / weight_sum

    model = from_loss(
        init_listed, run_attention, names=NAMES, blocks=blocks, inputs=TOKENS
    )
    step = make_train_step(model, optax.sgd(0.1), layout, devices=jax.devices()[:4])
    state, losses = step.init(seed=0), []
    params = jax.jit(init_listed)(jax.random.key(0))
    for _ in range(2):
        state, metrics = step(state, batch)
        loss, gradients = jax.jit(jax.value_and_grad(plain))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append((float(metrics["loss"]), float(loss)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=BOUND)


def test_a_compiled_step_is_the_one_that_runs():
    """And it has no unexpected collective."""
    model = from_loss(init_listed, run_list, names=NAMES, inputs=TOKENS)
    step = make_train_step(model, optax.adam(1e-3), "data=2,fsdp=2,tensor=2")
    state, batch, compiled = step.init(seed=0), tokens(8), []

    def listen(event, duration_s, **_):
        if event == COMPILING:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    step.compile(batch)
    before = len(compiled)
    step(state, batch)
    assert len(compiled) == before > 0
    assert_no_surprises(step, (batch,))


def test_attention_of_ones_own_is_pointed_to_attend(refuses):
    own = functools.partial(run_attention, attend=plain_attend)
    model = from_loss(init_listed, own, names=NAMES, inputs=TOKENS)
    with refuses("model.joins_tokens", "meshpar.attend", words=False):
        make_train_step(model, optax.sgd(0.1), "context=2,data=4")


def test_a_cut_loss_is_linted_and_planned():
    model = from_loss(
        init_listed, run_list, names=NAMES, blocks="layers", inputs=TOKENS
    )
    assert lint(model, STAGES, seq=SEQ).findings == ()
    workload = traced_workload(model, seq=SEQ)
    assert (workload.layers, workload.hidden) == (LAYERS, EMBED)
    # Two matmuls a token: 2 FLOPs for each weight.
    assert workload.traced.linear_flops == 2 * 2 * EMBED * 16


def test_a_loss_of_two_kinds_of_blocks_is_linted_planned_and_named():
    model = from_loss(
        init_two_kinds, run_readers, names=NAMES, blocks=KINDS, inputs=TOKENS
    )
    assert lint(model, STAGES, seq=SEQ).findings == ()
    assert traced_workload(model, seq=SEQ).layers == LAYERS + 2
    assert suggest_names(model, seq=SEQ)["**/up"] == ("embed", "mlp")


LANGUAGE = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "vocab": 32}
ROUTED = {**LANGUAGE, "experts": 4, "top_k": 2, "expert_ffn": 16, "bias_rate": 0.0}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4},
    **{"qk_rope_head_dim": 4, "v_head_dim": 4, "kv_heads": 0},
    **{"dense_layers": 1, "ffn": 32, "groups": 2, "top_groups": 1},
}
SMALL = {
    "test": {},
    "qwen2-0.5b": {**LANGUAGE, "ffn": 32},
    "qwen3-0.6b": {**LANGUAGE, "ffn": 32, "head_dim": 8},
    "llama3.2-1b": {**LANGUAGE, "ffn": 32},
    "tiny-moe": ROUTED,
    "tiny-moe-capacity": ROUTED,
    "qwen3-30b-a3b": {**ROUTED, "head_dim": 8},
    "deepseek-v3": {**ROUTED, **LATENT},
    "tiny-gemma3": {**LANGUAGE, "ffn": 32, "head_dim": 4, "window": 4},
    "tiny-vit": {"layers": 2, "embed": 16, "heads": 4, "pooling": "class_token"},
    "tiny-afno": {"layers": 2, "embed": 8, "height": 8, "width": 16, "patch": 2},
    "tiny-pair": {"embed": 8, "residues": 8, "heads": 2, "head_dim": 4, "channels": 8},
    "tiny-t5": {"embed": 16, "heads": 4, "ffn": 32, "vocab": 32, "max_seq": 8},
    "tiny-unet3d": {"depth": 8, "height": 8, "width": 4, "base": 4, "groups": 2},
}
"""Presets and sizes; a bias of the router would change."""


def contract_loss(model):
    """Return the functions of a model as a loss, its layers in a plain loop."""

    def loss(params, batch, key):
        ends, groups = model.split(params)
        _, states = model.split(initial_values(model, 0)[1])
        scope = Scope(batch=batch)
        x, layer, auxiliary = model.embed(ends, batch, scope), 0, 0.0
        for group, *stacked in zip(model.groups, groups, states, strict=True):
            x = x if group.enter is None else group.enter(ends, x, scope)
            for index in range(group.num_layers):
                own, state = jax.tree.map(lambda value, at=index: value[at], stacked)
                x, sums = group.run(own, x, scope.at_layer(layer, state))
                auxiliary, layer = auxiliary + group.weighted(sums), layer + 1
        loss_sum, weight_sum = model.loss_sums(ends, x, batch, scope)
        return loss_sum + auxiliary, weight_sum

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(set(ZOO) - OWN_CONTRACT), *SMALL])
def test_models_of_the_zoo_go_through_both_doors(name):
    if name in ZOO:
        model, batch = ZOO[name].model(2), ZOO[name].batch()
    else:
        model = build(name, **SMALL[name])
        batch = random_batch(model, 8, SEQ, seed=0)
    other = from_loss(
        lambda key: model.init(0), contract_loss(model), inputs=model.inputs
    )
    found = []
    for one in (model, other):
        step = make_train_step(
            one, optax.adam(1e-3), "data=2,fsdp=2", devices=jax.devices()[:4]
        )
        state, losses = step.init(seed=0), []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "blocks"),
    [
        ("nanogpt_nnx", STAGES, True),
        ("gpt2_linen", "fsdp=4,tensor=2", False),
        ("transformer_scan", "fsdp=4,tensor=2", True),
    ],
)
def test_steps_of_examples_have_no_surprises(name, layout, blocks):
    module = example(name)
    model = module.model(module.BLOCKS if blocks else None)
    step = make_train_step(model, module.optimizer, layout)
    assert_no_surprises(step, (module.batch(),))


def test_names_of_residuals_are_checked_on_sequences_that_the_model_takes():
    model = from_loss(init_u, run_u, names=NAMES, blocks=(*KINDS, "up"), inputs=TOKENS)
    [found] = lint(model, "data=2,remat=save:mlp_hidden", seq=SEQ).findings
    assert found.key == "layout.unknown_residual"


@pytest.mark.slow
def test_random_layouts_train_blocks_of_several_kinds_as_one_device():
    model = from_loss(init_u, run_u, names=NAMES, blocks=(*KINDS, "up"), inputs=TOKENS)
    report = check_layouts(model, num=4, seed=2, batch=tokens(16))
    assert "4 of 4 layouts agree" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, "layers"])
def test_random_layouts_train_as_one_device(blocks):
    nanogpt = example("nanogpt_nnx")
    model = nanogpt.model(blocks)
    report = check_layouts(model, num=4, seed=1, batch=nanogpt.batch())
    assert "4 of 4 layouts agree" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "loss", "blocks"),
    [
        (init_listed, run_list, None),
        (init_listed, run_list, "layers"),
        (init_u, run_u, (*KINDS, "up")),
    ],
)
def test_a_checkpoint_is_resumed_on_another_layout(init, loss, blocks, tmp_path):
    names = dict(names=NAMES, blocks=blocks, inputs=TOKENS)
    model, batch = from_loss(init, loss, **names), tokens(8)
    lines = ("fsdp=4,tensor=2", "data=8" if blocks is None else STAGES)
    one, other = (make_train_step(model, optax.adam(1e-2), line) for line in lines)
    state, _ = one(one.init(seed=0), batch)
    with Checkpoints(tmp_path / "run", layer_orders=one.layer_orders) as checkpoints:
        checkpoints.save(state, {})
    with Checkpoints(tmp_path / "run", layer_orders=other.layer_orders) as checkpoints:
        restored = checkpoints.restore(other.state_shapes, other.shardings)
    _, expected = one(state, batch)
    _, metrics = other(restored, batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=BOUND)
