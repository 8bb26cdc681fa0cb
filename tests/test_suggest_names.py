"""Suggested names of a loss's parameters, and findings about names that cost traffic.

Everything here is traced; nothing is compiled.
"""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Input, from_loss, from_nnx, lint, suggest_names
from meshpar.cli.main import main
from meshpar.models.presets import build
from tests.marks import slow

LAYOUT, SEQ = "fsdp=4,tensor=2", 16
E, F, H, D, V = 32, 48, 4, 8, 64
TOKENS = {name: Input(("batch", "seq"), "int", below=V) for name in ("x", "y")}

COLUMNS, ROWS = ("embed", "mlp"), ("mlp", "embed")
INTO_HEADS, OUT_OF_HEADS = ("embed", "heads"), ("heads", "embed")
OF_EXAMPLES = {
    "nanogpt_nnx": {
        "**/key/kernel": INTO_HEADS,
        "**/out/kernel": OUT_OF_HEADS,
        "**/query/kernel": INTO_HEADS,
        "**/value/kernel": INTO_HEADS,
        "**/down/kernel": ROWS,
        "**/up/bias": ("mlp",),
        "**/up/kernel": COLUMNS,
        "positions/embedding": (None, "embed"),
        "tokens/embedding": ("vocab", "embed"),
    },
    "gpt2_linen": {
        "**/c_attn/kernel": ("embed", None),
        "**/attn/c_proj/kernel": (None, "embed"),
        "**/c_fc/bias": ("mlp",),
        "**/c_fc/kernel": COLUMNS,
        "**/mlp/c_proj/kernel": ROWS,
        "**/wpe/embedding": (None, "embed"),
        "**/wte/embedding": ("vocab", "embed"),
    },
    "transformer_scan": {
        "**/embedding": ("vocab", "embed"),
        "params/out/kernel": ("embed", "vocab"),
        "**/key/kernel": ("embed", "heads", "head_dim"),
        "**/MultiHeadDotProductAttention_*/out/kernel": ("heads", "head_dim", "embed"),
        "**/query/kernel": ("embed", "heads", "head_dim"),
        "**/value/kernel": ("embed", "heads", "head_dim"),
        "**/down/kernel": ROWS,
        "**/gate/kernel": COLUMNS,
    },
    "mixer_equinox": {
        "read/weight": ("embed", None),
        "write/weight": (None, "embed"),
        "**/0/bias": ("mlp",),
        "**/hidden_mlp/layers/0/weight": ROWS,
        "**/hidden_mlp/layers/1/weight": COLUMNS,
        "**/patch_mlp/layers/0/weight": ("mlp", None),
        "**/patch_mlp/layers/1/weight": (None, "mlp"),
    },
}


@pytest.mark.parametrize(
    ("name", "with_blocks"),
    [
        *((name, True) for name in OF_EXAMPLES),
        *((name, False) for name in ("gpt2_linen",)),
        slow("nanogpt_nnx", False),
    ],
)
def test_the_names_of_the_examples_are_found_and_lint_accepts_them(name, with_blocks):
    module = importlib.import_module(f"recipes.examples.{name}")
    blocks = module.BLOCKS if with_blocks else None
    inputs = module.model(module.BLOCKS).inputs
    model = from_loss(module.init, module.loss, blocks=blocks, inputs=inputs)
    names = suggest_names(model, seq=SEQ)
    assert names == OF_EXAMPLES[name]
    named = from_loss(
        module.init, module.loss, names=names, blocks=blocks, inputs=inputs
    )
    assert lint(named, LAYOUT, seq=SEQ).findings == ()


def test_the_dim_of_scanned_layers_has_no_name_without_blocks():
    module = importlib.import_module("recipes.examples.transformer_scan")
    names = suggest_names(from_loss(module.init, module.loss), seq=SEQ)
    assert names["**/gate/kernel"] == (None, *COLUMNS)
    [reason] = names.reasons["**/gate/kernel"]
    assert reason == "dim 0 (4): layers that a loop runs over; blocks= names them"


def test_channels_of_convolutions_are_not_split():
    module = importlib.import_module("recipes.examples.resnet_nnx")
    names = suggest_names(module.model(None))
    assert {name for axes in names.values() for name in axes} <= {None, "embed"}
    window, *_ = names.reasons["stem/kernel"]
    assert window == "dim 0 (3): places of a convolution's kernel"


# Models of plain dicts: layers that a loss runs over its stream.


def zeros(**shapes):
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def language_model(layer, vocab=V, **shapes):
    """init and loss of two residual layers between a table and a head."""

    def init(key):
        layers = [zeros(**shapes) for _ in range(2)]
        return {**zeros(table=(vocab, E), out=(E, vocab)), "layers": layers}

    def loss(params, batch, key):
        x = params["table"][batch["x"]]
        for one in params["layers"]:
            x = x + layer(one, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["out"], batch["y"]
        )
        return losses.sum(), jnp.float32(losses.size)

    return init, loss


def attention(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
    return mixed.reshape(*mixed.shape[:2], -1)


def grouped(p, x):
    """Two heads of keys and values for four of queries."""
    heads = (*x.shape[:2], -1, D)
    q, k, v = ((x @ p[name]).reshape(heads) for name in "qkv")
    return attention(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)) @ p["o"]


def fused(p, x):
    heads = (*x.shape[:2], H, D)
    parts = jnp.split(x @ p["qkv"], 3, axis=-1)
    return attention(*(part.reshape(heads) for part in parts)) @ p["o"]


def fused_by_reshape(p, x):
    qkv = (x @ p["qkv"]).reshape(*x.shape[:2], 3, H, D)
    return attention(*(qkv[:, :, at] for at in range(3))) @ p["o"]


def fused_in_dims(p, x):
    qkv = jnp.einsum("bse,ekhd->bskhd", x, p["qkv"])
    return attention(*(qkv[:, :, at] for at in range(3))) @ p["o"]


def unstacked(p, x):
    return attention(*jnp.unstack(jnp.einsum("bse,ekhd->kbshd", x, p["qkv"]))) @ p["o"]


def gated(p, x):
    return (jax.nn.gelu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def experts(p, x):
    """Every expert takes every token; the router weighs what they return."""
    weights = jax.nn.softmax(x @ p["router"])
    each = jnp.broadcast_to(x, (6, *x.shape))
    hidden = jax.nn.silu(jnp.einsum("nbse,nef->nbsf", each, p["up"]))
    return jnp.einsum("nbsf,nfe,bsn->bse", hidden, p["down"], weights)


TABLES = {"table": ("vocab", "embed"), "out": ("embed", "vocab")}
FUSED = {"qkv": (E, 3 * E), "o": (E, E)}
GATED = {"gate": (E, F), "up": (E, F), "down": (F, E)}


def of_matrices(layer, shapes, vocab=V):
    """Suggested names, by the last key of the pattern, and the reasons of None."""
    init, loss = language_model(layer, vocab, **shapes)
    names = suggest_names(from_loss(init, loss, inputs=TOKENS), seq=SEQ)
    model = from_loss(init, loss, names=names, inputs=TOKENS)
    assert lint(model, LAYOUT, seq=SEQ).findings == ()
    reasons = {one.split("/")[-1]: why for one, why in names.reasons.items()}
    return {one.split("/")[-1]: axes for one, axes in names.items()}, reasons


def test_gates_share_the_name_of_what_they_gate():
    names, reasons = of_matrices(gated, GATED)
    assert names == {**TABLES, "gate": COLUMNS, "up": COLUMNS, "down": ROWS}
    assert reasons == {}


def test_fewer_heads_of_keys_and_values_are_kv_heads():
    shapes = {"q": (E, E), "k": (E, 2 * D), "v": (E, 2 * D), "o": (E, E)}
    names, _ = of_matrices(grouped, shapes)
    kv = ("embed", "kv_heads")
    assert names == {**TABLES, "q": INTO_HEADS, "k": kv, "v": kv, "o": OUT_OF_HEADS}


@pytest.mark.parametrize("layer", [fused, fused_by_reshape])
def test_a_fused_projection_has_no_name_and_the_reason_says_where_it_is_cut(layer):
    names, reasons = of_matrices(layer, FUSED)
    assert names == {**TABLES, "qkv": ("embed", None), "o": (None, "embed")}
    [reason] = reasons["qkv"]
    assert reason.startswith("dim 1 (96): cut, or a piece cut, at ")
    assert "test_suggest_names.py:" in reason


@pytest.mark.parametrize("layer", [fused_in_dims, unstacked])
def test_heads_of_a_projection_with_the_pieces_in_their_own_dim_are_named(layer):
    names, reasons = of_matrices(layer, {**FUSED, "qkv": (E, 3, H, D)})
    assert names["qkv"] == ("embed", None, "heads", "head_dim")
    assert reasons["qkv"][0].startswith("dim 1 (3): cut, or a piece cut, at 1, 2")


def test_experts_are_named_and_the_dims_between_their_matrices():
    shapes = {"router": (E, 6), "up": (6, E, F), "down": (6, F, E)}
    names, _ = of_matrices(experts, shapes)
    assert names["up"] == ("experts", "embed", "mlp")
    assert names["down"] == ("experts", "mlp", "embed")


def test_a_vocabulary_that_no_axis_of_2_divides_has_no_name():
    names, reasons = of_matrices(gated, GATED, vocab=V + 1)
    assert names["table"] == (None, "embed")
    [reason] = reasons["table"]
    assert reason == "dim 0 (65): 65 does not divide by 2; pad it to split it"


def test_of_a_chain_of_matrices_every_second_dim_is_split():
    def init(key):
        return zeros(a=(E, F), b=(F, F), c=(F, F), d=(F, 1))

    def loss(params, batch, key):
        y = batch["x"]
        for name in "abcd":
            y = jnp.tanh(y @ params[name])
        return y.sum(), jnp.float32(len(y))

    inputs = {"x": Input(("batch", None), shape=(None, E))}
    names = suggest_names(from_loss(init, loss, inputs=inputs))
    assert names == {
        "a": (None, "mlp"),
        "b": ("mlp", None),
        "c": (None, "mlp"),
        "d": ("mlp", None),
    }


def test_names_come_from_models_of_from_loss_alone(refuses):
    with refuses("model.names_not_by_path", "from_loss"):
        suggest_names(build("test"))


# Findings.


def findings(layer, shapes, names, layout=LAYOUT):
    init, loss = language_model(layer, **shapes)
    names = {**TABLES, **{f"**/{one}": axes for one, axes in names.items()}}
    model = from_loss(init, loss, names=names, inputs=TOKENS)
    return lint(model, layout, seq=SEQ).findings


@pytest.mark.parametrize("layer", [fused, fused_by_reshape])
def test_a_split_dim_that_is_cut_into_q_k_and_v_is_a_finding(layer):
    names = {"qkv": INTO_HEADS, "o": OUT_OF_HEADS}
    found = findings(layer, FUSED, names)
    assert [one.key for one in found] == ["model.split_dim_cut"] * 2
    assert [one.path.split(".")[1] for one in found] == ["0", "1"]
    for words in ("'heads'", "tensor", "test_suggest_names.py:", "(embed, 3, heads"):
        assert words in found[0].message
    assert findings(layer, FUSED, names, "fsdp=8") == ()


def test_a_split_of_what_reads_the_pieces_is_a_finding():
    """GSPMD hands the split on to the pieces, and to the dim that they are cut from."""
    names = {"qkv": ("embed", None), "o": OUT_OF_HEADS}
    found = findings(fused, FUSED, names)
    assert [one.key for one in found] == ["model.split_dim_cut"] * 2
    assert found[0].path == "layers.0.o"


def test_spellings_that_cut_no_split_dim_are_clean():
    whole = {"qkv": ("embed", None), "o": (None, "embed")}
    assert findings(fused, FUSED, whole) == ()
    shapes = {**FUSED, "qkv": (E, 3, H, D)}
    names = {"qkv": ("embed", None, "heads", None), "o": OUT_OF_HEADS}
    assert findings(fused_in_dims, shapes, names) == ()
    shapes = {"q": (E, E), "k": (E, 2 * D), "v": (E, 2 * D), "o": (E, E)}
    names = {**dict.fromkeys("qkv", INTO_HEADS), "o": OUT_OF_HEADS}
    assert findings(grouped, shapes, names) == ()


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.read = nnx.Linear(8, E, rngs=rngs)

    def embed(self, batch, scope):
        return self.read(batch["x"])

    def head(self, stream, batch, scope):
        return (stream**2).sum(), np.float32(len(stream))


class Gated(nnx.Module):
    """A gate and what it gates are one matrix."""

    def __init__(self, rngs):
        def linear(*sizes, axes):
            return nnx.Linear(*sizes, kernel_metadata={"out_sharding": axes}, rngs=rngs)

        self.both = linear(E, 2 * F, axes=COLUMNS)
        self.down = linear(F, E, axes=ROWS)

    def __call__(self, stream, scope):
        gate, up = jnp.split(self.both(stream), 2, axis=-1)
        return stream + self.down(nnx.gelu(gate) * up)


def test_a_module_that_cuts_a_split_dim_is_a_finding():
    model = from_nnx(
        ends=Ends,
        block=Gated,
        num_layers=2,
        stream=("batch", "embed"),
        inputs={"x": Input(("batch", None), shape=(None, 8))},
    )
    [found] = lint(model, LAYOUT).findings
    assert (found.key, found.path) == ("model.split_dim_cut", "blocks.both.kernel")


# The command.


def test_the_command_prints_a_table_that_is_python(capsys):
    assert main(["name", "recipes.examples.gpt2_linen:model", "--seq", "16"]) == 0
    found = {}
    exec(capsys.readouterr().out, found)
    assert found["names"] == OF_EXAMPLES["gpt2_linen"]


def parts():
    """Return the parts of a model: init, loss, and arrays of a batch."""
    tokens = np.zeros((2, SEQ), np.int32)
    return *language_model(gated, **GATED), {"x": tokens, "y": tokens}


def nothing():
    """No model at all."""
    return 0


def no_inputs():
    """A third part that is no dict."""
    return *language_model(gated, **GATED), TOKENS["x"]


def test_the_command_takes_init_loss_and_arrays(capsys):
    assert main(["name", f"{__name__}:parts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"]["**/down"] == [*ROWS]
    assert found["reasons"] == {}


@pytest.mark.parametrize(
    ("function", "key"),
    [
        (nothing, "command.no_model_returned"),
        (no_inputs, "command.no_model_returned"),
        (gated, "command.bad_model_function"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(function, key, refuses_command):
    refuses_command(["name", f"{__name__}:{function.__name__}"], key)
