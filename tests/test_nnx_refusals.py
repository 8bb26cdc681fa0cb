"""What Flax modules do that a layout would lose is refused, and nothing like it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Blocks, Input, Layout, from_nnx, make_train_step

SIZE = 4
INPUTS = {"x": Input(("batch", None), shape=(None, SIZE))}
BATCH = {"x": jax.ShapeDtypeStruct((8, SIZE), jnp.float32)}
COUNT = itertools.count(1)
OUTSIDE = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
STREAMS = nnx.Rngs(0)


def draw(rngs, *shape):
    return nnx.Param(nnx.initializers.normal(0.3)(rngs.params(), shape))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.w = draw(rngs, SIZE, 1)

    def embed(self, batch, scope):
        return batch["x"]

    def head(self, x, batch, scope):
        x = jax.tree.leaves(x)[0]
        return jnp.sum((x @ self.w[...]) ** 2), jnp.float32(len(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.w = draw(rngs, SIZE, SIZE)

    def __call__(self, x, scope):
        return x + jnp.tanh(x @ self.w[...])


def model(block=Block, ends=Ends, num_layers=2):
    return from_nnx(ends=ends, block=block, num_layers=num_layers, inputs=INPUTS)


def trace(model, layout="data=2"):
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    step = make_train_step(model, optax.sgd(0.1), layout, devices=devices)
    with jax.set_mesh(step.mesh):
        jax.eval_shape(step.functions.update, step.state_shapes, BATCH)


class EndsSharing(Ends):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.outside = OUTSIDE

    def embed(self, batch, scope):
        return self.outside(batch["x"])


class Sharing(nnx.Module):
    def __init__(self, rngs):
        self.outside = OUTSIDE

    def __call__(self, x, scope):
        return x + self.outside(x)


def test_parameters_from_outside_are_refused_where_there_are_several(refuses):
    of_block = ("from_nnx(block=Sharing)", "'outside.bias'")
    with refuses("model.param_shared_by_layers", *of_block, "nnx.Param"):
        model(Sharing)
    shared = "model.param_shared_by_builders"
    with refuses(shared, *of_block, "from_nnx(ends=EndsSharing)"):
        model(Sharing, EndsSharing, num_layers=1)
    with refuses(
        shared, "groups['two'].block", "groups['one'].block", "'outside.bias'"
    ):
        of = {name: Blocks(block=Sharing, num_layers=1) for name in ("one", "two")}
        from_nnx(ends=Ends, groups=of, inputs=INPUTS)


def test_parameters_from_outside_can_be_those_of_the_ends_or_of_one_layer():
    trace(model(ends=EndsSharing))
    trace(model(Sharing, num_layers=1))


class NumpyDraws(Block):
    def __init__(self, rngs):
        self.w = nnx.Param(np.random.normal(size=(SIZE, SIZE)).astype(np.float32))


class CountedScale(Block):
    def __init__(self, rngs):
        self.w = nnx.Param(draw(rngs, SIZE, SIZE)[...] / next(COUNT))


class NumpyTable(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = np.random.normal(size=SIZE)


class Counted(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dilation = next(COUNT)


class OuterStreams(Block):
    def __init__(self, rngs):
        super().__init__(STREAMS)


class Dotted(nnx.Module):
    def __init__(self, rngs):
        of_b = nnx.Dict({"c": draw(rngs, SIZE)})
        self.a = nnx.Dict({"b": of_b, "b.c": draw(rngs, SIZE)})

    def __call__(self, x, scope):
        return x * self.a["b"]["c"][...] + self.a["b.c"][...]


class Unparametrised(nnx.Module):
    def __init__(self, rngs):
        pass

    def __call__(self, x, scope):
        return jnp.tanh(x)


class Integers(nnx.Module):
    def __init__(self, rngs):
        self.order = nnx.Param(jnp.arange(SIZE))

    def __call__(self, x, scope):
        return x[:, self.order[...]]


class Extra(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        if next(COUNT) % 2:
            self.bias = nnx.Param(jnp.zeros(SIZE))


class Widened(Block):
    def __init__(self, rngs):
        self.w = draw(rngs, SIZE, next(COUNT))


class OtherDtypes(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        dtype = jnp.float32 if next(COUNT) % 2 else jnp.bfloat16
        self.bias = nnx.Param(jnp.zeros(SIZE, dtype))


class OtherKinds(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        kind = nnx.Param if next(COUNT) % 2 else nnx.Variable
        self.bias = kind(jnp.zeros(SIZE))


class Text(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.inside = nnx.Dict({"names": np.array(["a", "b"])})


class Several(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.scales = nnx.Variable({"a": jnp.ones(SIZE)})


@pytest.mark.parametrize(
    "block, refusal",
    [
        (NumpyDraws, ("model.builds_differ_in_values", "'w'", "nnx.Rngs")),
        (CountedScale, ("model.builds_differ_in_values", "'w'", "nnx.Rngs")),
        (NumpyTable, ("model.builds_differ_in_values", "'table'", "nnx.Rngs")),
        (Counted, ("model.builds_differ", "'dilation'", 1, 2)),
        (Extra, ("model.builds_differ", "'bias'", "Param of float32(4,)", "nothing")),
        (Widened, ("model.builds_differ", "'w'", "float32(4, 1)", "float32(4, 2)")),
        (OtherDtypes, ("model.builds_differ", "'bias'", "float32(4,)", "bfloat16(4,)")),
        (OtherKinds, ("model.builds_differ", "'bias'", "Param", "Variable")),
        (Text, ("model.not_an_array", "'inside.names'", "ndarray", "<U1")),
        (Several, ("model.not_an_array", "'scales'", "dict")),
        (OuterStreams, ("model.builder_changes_outside", "from_nnx(block=...)")),
        (
            Dotted,
            ("model.duplicate_array_name", "'a.b.c'", ("a", "b", "c"), ("a", "b.c")),
        ),
        (Unparametrised, ("model.block_without_parameters", "nnx.Param")),
        (Integers, ("model.block_without_parameters", "nnx.Param")),
    ],
)
def test_a_block_that_layers_cannot_be_built_of_is_refused(
    block, refusal, refuses, monkeypatch
):
    monkeypatch.setitem(globals(), "COUNT", itertools.count(1))
    with refuses(*refusal):
        model(block)


def test_a_name_of_the_ends_that_is_also_a_blocks_is_refused(refuses):
    class EndsDotted(Ends):
        def __init__(self, rngs):
            super().__init__(rngs)
            setattr(self, "blocks.w", draw(rngs, SIZE))

    with refuses("model.name_of_blocks_taken", "ends=EndsDotted", "'blocks.w'"):
        model(ends=EndsDotted)


class Given(Block):
    """Arrays made before: the same in every build."""

    constant = np.arange(SIZE, dtype=np.float32)
    key = jax.random.key(3)

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(self.key, (SIZE, SIZE)) * self.constant)
        self.table = self.constant
        self.activation = lambda x: jnp.tanh(x)


def test_a_block_of_what_is_the_same_in_every_build_is_accepted():
    trace(model(Given))


class Assigning(Block):
    def __call__(self, x, scope):
        self.w[...] = self.w[...] / jnp.linalg.norm(self.w[...])
        return super().__call__(x, scope)


class AssigningInside(Block):
    def __call__(self, x, scope):
        def double(one):
            one.w[...] = 2 * one.w[...]

        nnx.jit(double)(self)
        return super().__call__(x, scope)


class Updating(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean = nnx.Variable(jnp.zeros(()))

    def update_state(self, sums):
        self.w[...] = 2 * self.w[...]


class OnPython(Block):
    def __call__(self, x, scope):
        return super().__call__(x, scope) if scope.layer == 0 else x


@pytest.mark.parametrize(
    "block, refusal",
    [
        (
            Assigning,
            ("model.assigns_parameter", "block=Assigning", "__call__", "'w'"),
        ),
        (AssigningInside, ("model.assigns_parameter", "__call__", "'w'")),
        (
            Updating,
            ("model.assigns_parameter", "block=Updating", "update_state", "'w'"),
        ),
        (
            OnPython,
            (
                *("model.traced_number", "__call__", "test_nnx_refusals.py"),
                "`if scope.layer == 0`",
            ),
        ),
    ],
)
def test_a_block_whose_call_would_be_lost_or_cannot_be_traced_is_refused(
    block, refusal, refuses
):
    with refuses(*refusal):
        trace(model(block))


IN_A_FOLDER = """
class InAFolder(Block):
    def __call__(self, x, scope):
        return x if scope.layer == 0 else 2 * x
"""


@pytest.mark.parametrize("folder", ["jax", "flax", "meshpar"])
def test_the_line_that_asks_for_a_number_is_named_in_a_folder_of_any_name(
    folder, refuses
):
    found = {"__name__": "project", "Block": Block}
    exec(compile(IN_A_FOLDER, f"/home/me/{folder}/project.py", "exec"), found)
    with refuses("model.traced_number", "project.py:4"):
        trace(model(found["InAFolder"]))


class EndsAssigning(Ends):
    def embed(self, batch, scope):
        self.w[...] = 2 * self.w[...]
        return batch["x"]


class EndsOfLosses(Ends):
    def head(self, x, batch, scope):
        loss, weight = super().head(x, batch, scope)
        return {"loss": loss}, weight


class EndsOfLeaves(Ends):
    def embed(self, batch, scope):
        return {"x": batch["x"], "w": self.w[...][:3]}


@pytest.mark.parametrize(
    "ends, refusal",
    [
        (EndsAssigning, ("model.assigns_parameter", "embed", "'w'")),
        (EndsOfLosses, ("model.head_not_scalars", ["dict", ()])),
        (EndsOfLeaves, ("model.stream_examples_differ", "'w': (3, 1)", "'x': (8, 4)")),
    ],
)
def test_ends_that_return_or_assign_otherwise_are_refused(ends, refusal, refuses):
    with refuses(*refusal):
        trace(model(ends=ends))


class Inside(Block):
    """What puts the module's arrays back as they were."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.scale = nnx.Variable(jnp.ones(()))
        self.linear = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.norm = nnx.WeightNorm(self.linear, rngs=rngs)

    def __call__(self, x, scope):
        x = nnx.jit(lambda one, x: x @ one.w[...] * one.scale[...])(self, x)
        return self.norm(nnx.remat(lambda one, x: x @ one.w[...])(self, x))


class NormedPair(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(SIZE, rngs=rngs)

    def __call__(self, stream, scope):
        x, others = stream
        return self.norm(x + others["x"] @ self.w[...]), others


class EndsOfPair(Ends):
    def embed(self, batch, scope):
        return batch["x"], {"x": batch["x"]}


def test_a_block_that_leaves_its_parameters_as_they_are_is_accepted():
    trace(model(Inside))


def test_a_stream_of_an_array_and_a_dict_is_none_with_sums_beside_batch_norm():
    trace(model(NormedPair, EndsOfPair))
