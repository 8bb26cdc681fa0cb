"""Flax NNX modules become a model that starts as Flax starts them, on every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Layout, batch_shapes, from_nnx, initial_key, make_train_step
from meshpar.machine.mesh import use_mesh
from tests.marks import slow

# XLA:CPU of jax 0.12 rounds some draws of an array of up to sixteen values in another
# way than in a larger one: a part of the table on each of eight devices has 32.
EMBED, VOCAB = 4, 64


def draw(rngs, *shape):
    return nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), shape, jnp.float32))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = draw(rngs, VOCAB, EMBED)

    def embed(self, batch, scope):
        return self.table[...][batch["tokens"]]

    def head(self, x, batch, scope):
        logits = x @ self.table[...].T
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (draw(rngs, EMBED, EMBED) for _ in range(2))

    def __call__(self, x, scope):
        return x + x @ self.first[...] @ self.second[...]


class Widening(Block):
    def __call__(self, x, scope):
        return jnp.concatenate([x, x], axis=-1)


class Narrowing(Block):
    def __call__(self, x, scope):
        return x.astype(jnp.bfloat16)


def model(block=Block, *, num_layers=2, ends=Ends, **options):
    return from_nnx(ends=ends, block=block, num_layers=num_layers, **options)


class Odd(nnx.Module):
    """Values that several draws of one build, and arrays that no gradient reaches."""

    def __init__(self, rngs):
        self.experts = nnx.Param(
            jnp.stack([draw(rngs, EMBED, EMBED)[...] for _ in range(4)])
        )
        self.v = draw(rngs, EMBED, EMBED)
        self.target = nnx.Param(self.v[...])
        self.scale = nnx.Param(jnp.linalg.norm(self.v[...], axis=0))
        whole = nnx.initializers.orthogonal()(rngs.params(), (EMBED, EMBED))
        self.left, self.right = nnx.Param(whole[:, :1]), nnx.Param(whole[:, 1:])
        self.phase = nnx.Param(jnp.exp(1j * draw(rngs, EMBED)[...]))
        self.order = nnx.Param(jax.random.permutation(rngs.params(), EMBED))
        self.shift = jnp.arange(EMBED) / EMBED
        self.table = np.arange(EMBED)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x, scope):
        assert isinstance(self.table, np.ndarray)
        x = self.dropout(x[..., self.order[...]]) @ self.v[...]
        mixed = jnp.einsum("...d,edf->...f", x, self.experts[...]) / self.scale[...]
        return x + jnp.abs(mixed * self.phase[...] + 1j) + self.shift + self.table


@functools.cache
def initial(block=Block, num_layers=2, seed=0):
    return jax.jit(model(block, num_layers=num_layers).init)(seed)


# As programs are compiled outside of these tests: LLVM without optimisation contracts
# the same sums and products in one loop and not in another.
OPTIMISED = {"xla_backend_optimization_level": 3}


@functools.partial(jax.jit, static_argnums=0, compiler_options=OPTIMISED)
def built(builder, key):
    """The parameters that Flax makes."""
    state = nnx.state(builder(nnx.Rngs(key)), nnx.Param)
    return {path[0]: value[...] for path, value in nnx.to_flat_state(state)}


@pytest.mark.parametrize(
    ("block", "line"),
    [
        slow(Block, "fsdp=8"),
        *(slow(Block, line) for line in ("data=1", "stage=2,tensor=2", "stage=3")),
        *(slow(Odd, line) for line in ("data=1", "stage=2,tensor=2", "stage=3")),
        slow(Odd, "fsdp=8"),
    ],
)
@pytest.mark.filterwarnings("ignore::meshpar.IdleMeshAxisWarning")
def test_modules_start_as_flax_starts_them_from_the_key_of_seed_group_and_layer(
    block, line
):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    options = {"devices": devices, "compiler_options": OPTIMISED}
    of_blocks = model(block, num_layers=5)
    step = make_train_step(of_blocks, optax.sgd(0.1), layout, **options)
    found = step.in_layer_order(step.init(3).params)
    for layer in range(5):
        wanted = built(block, initial_key(3, "blocks", layer))
        assert set(found["blocks"]) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found["blocks"][name][layer], value, name)
            assert found["blocks"][name].dtype == value.dtype
    table = built(Ends, initial_key(3, "ends"))["table"]
    np.testing.assert_array_equal(found["table"], table)


@pytest.mark.slow
def test_parameters_of_integers_are_constants_among_the_parameters():
    step = make_train_step(model(Odd), optax.adam(0.1), "data=8")
    state = step.init(0)
    tokens = np.zeros((8, 4), np.int32)
    batch = dict(tokens=tokens, targets=tokens, weights=np.ones((8, 4)))
    before = jax.device_get(state.params["blocks"])
    subject = step.audit_subject(batch, gradients_only=True)
    with use_mesh(step.mesh):
        *_, gradients = jax.eval_shape(subject.function, *subject.arguments)
    state, _ = step(state, batch)
    after = jax.device_get(state.params["blocks"])
    assert "order" not in gradients["blocks"]
    np.testing.assert_array_equal(after["order"], before["order"])
    assert np.abs(after["phase"].imag - before["phase"].imag).max() > 0
    np.testing.assert_array_equal(
        jax.device_get(state.model_state["blocks"]["shift"]), [np.arange(4) / 4] * 2
    )


def test_another_layer_changes_no_earlier_layer():
    short, deep = initial(), initial(num_layers=3)
    first_two = jax.tree.map(lambda value: value[:2], deep["blocks"])
    jax.tree.map(np.testing.assert_array_equal, short, {**deep, "blocks": first_two})


def test_values_differ_between_seeds_paths_and_layers():
    params, reseeded = initial(), initial(seed=1)
    first, second = params["blocks"]["first"], params["blocks"]["second"]
    values = [*first, *second, *reseeded["blocks"]["first"]]
    distinct = {np.asarray(value).tobytes() for value in values}
    assert len(distinct) == len(values)


def test_initial_values_are_the_same_compiled_and_not():
    jax.tree.map(np.testing.assert_array_equal, model().init(0), initial())


def test_parameters_carry_their_shape_and_layers():
    flat = model().flat_parameters()
    assert {path: leaf.stacked_shape for path, leaf in flat.items()} == {
        "blocks.first": (2, EMBED, EMBED),
        "blocks.second": (2, EMBED, EMBED),
        "table": (VOCAB, EMBED),
    }


class Counting(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, scope):
        self.calls[...] += len(x)
        return super().__call__(x, scope)


class Dropping(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, scope):
        return self.dropout(super().__call__(x, scope))


@pytest.mark.parametrize(
    "block, refusal",
    [
        (
            Counting,
            ("model.block_assigns_state", "block=Counting", "__call__", "'calls'"),
        ),
        (
            Dropping,
            ("model.own_random_stream", "block=Dropping", "'dropout.rngs.count'"),
        ),
    ],
)
def test_what_depends_on_the_layout_is_refused(block, refusal, refuses):
    step = make_train_step(model(block), optax.sgd(0.1), "data=8")
    with refuses(*refusal):
        step.compile(batch_shapes(8, 4))


class Recurrent(nnx.Module):
    """Flax draws a key for the cell's first carry, and makes that of zeros."""

    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(EMBED, EMBED, rngs=rngs))

    def __call__(self, x, scope=None):
        return x + self.rnn(x)


@pytest.mark.parametrize("layout", ["data=8", "data=2,stage=2,microbatches=2"])
@pytest.mark.slow
def test_a_flax_rnn_trains_as_flax_runs_it(layout):
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    step = make_train_step(
        model(Recurrent), optax.sgd(0.1), layout, devices=devices, max_grad_norm=1e6
    )
    tokens = np.arange(64).reshape(8, 8) % VOCAB
    batch = {"tokens": tokens, "targets": tokens[::-1], "weights": np.ones((8, 8))}
    with nnx.use_eager_sharding(False):
        keys = [initial_key(0, "ends"), *(initial_key(0, "blocks", i) for i in (0, 1))]
        ends, *blocks = (
            builder(nnx.Rngs(key))
            for builder, key in zip([Ends, Recurrent, Recurrent], keys, strict=True)
        )

        @nnx.value_and_grad
        def loss(modules):
            x = modules[0].embed(batch, None)
            for block in modules[1:]:
                x = block(x)
            losses, weights = modules[0].head(x, batch, None)
            return losses / weights

        value, gradients = nnx.jit(loss)([ends, *blocks])
    _, metrics = step(step.init(0), batch)
    found = [metrics["loss"], metrics["grad_norm"]]
    wanted = [value, optax.tree.norm(gradients)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_random_key_in_a_module_is_refused(refuses):
    class Keyed(Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.key = rngs.params()

    with refuses("model.own_random_key", "block=Keyed", "'key'"):
        model(Keyed)


@pytest.mark.parametrize(
    "options, refusal",
    [
        ({"num_layers": 0}, ("value.not_whole_number", "num_layers=0", 1)),
        ({"group": "ends"}, ("model.group_named_ends", "'ends'")),
        (
            {"group": "table"},
            ("model.name_of_blocks_taken", "from_nnx(ends=Ends)", "'table'"),
        ),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(options, refusal, refuses):
    with refuses(*refusal):
        model(**options)


@pytest.mark.parametrize(
    "block, change",
    [
        (Widening, "float32(2, 4, 4) to float32(2, 4, 8)"),
        (Narrowing, "float32(2, 4, 4) to bfloat16(2, 4, 4)"),
    ],
)
def test_a_block_that_changes_shape_or_dtype_is_refused(block, change, refuses):
    step = make_train_step(
        model(block), optax.sgd(0.1), "data=1", devices=jax.devices()[:1]
    )
    what = f"from_nnx(block={block.__name__})"
    with refuses("model.stream_changed", what, "__call__", change):
        step.compile(batch_shapes(2, 4))


def test_a_model_without_logits_says_so():
    assert model().logits is None
