"""A reason follows from what a collective serves, not from a shape that fits."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import batch_shapes, from_nnx, make_train_step
from meshpar.audit.evidence import Evidence, constrained_arrays
from meshpar.audit.reasons import Explained, explain
from meshpar.audit.report import AuditReport, audit
from meshpar.audit.subject import Subject
from meshpar.trace.operations import operations
from tests.test_audit_counts import array, mesh_of
from tests.test_audit_surprises import line_with
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler, step_on

EMBED, MLP, HEADS, SEQ = 16, 32, 4, 64
HIDDEN = ("batch", "seq", "mlp")
RESIDUAL = ("batch", "residual_seq", "embed")


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(64, EMBED, rngs=rngs)

    def embed(self, batch, scope):
        return self.table(batch["tokens"])

    def head(self, x, batch, scope):
        logits = self.table.attend(x).astype("float32")
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return (losses * batch["weights"]).sum(), batch["weights"].sum()


def weight(rngs, *axes: tuple[int, str | None]) -> nnx.Param:
    """A weight of these sizes and logical axes."""
    sizes, names = zip(*axes, strict=True)
    return nnx.Param(jax.random.normal(rngs.params(), sizes), out_sharding=names)


class Summing(nnx.Module):
    """Adds up along the hidden dim, which is split."""

    def __init__(self, rngs):
        self.up = weight(rngs, (EMBED, "embed"), (MLP, "mlp"))
        self.down = weight(rngs, (MLP, "mlp"), (EMBED, "embed"))

    def __call__(self, x, scope):
        hidden = scope.constrain(x @ self.up[...], HIDDEN)
        hidden = scope.constrain(jnp.cumsum(hidden, axis=-1), HIDDEN)
        return scope.constrain(x + hidden @ self.down[...], RESIDUAL)


class SummingAnyhow(Summing):
    """The same; GSPMD chooses how the sums lie."""

    def __call__(self, x, scope):
        hidden = scope.constrain(x @ self.up[...], HIDDEN)
        hidden = jnp.cumsum(hidden, axis=-1)
        return scope.constrain(x + hidden @ self.down[...], RESIDUAL)


class Unconstrained(Summing):
    """Two weights of the same sizes, gathered because tokens are split."""

    def __call__(self, x, scope):
        hidden = jnp.tanh(x @ self.up[...])
        return scope.constrain(x + hidden @ self.down[...], RESIDUAL)


class SplitHeadDim(nnx.Module):
    """Attention whose heads are whole, and whose head_dim is split."""

    def __init__(self, rngs):
        heads = ((HEADS, None), (MLP // HEADS, "mlp"))
        self.q = weight(rngs, (EMBED, "embed"), *heads)
        self.k = weight(rngs, (EMBED, "embed"), *heads)
        self.v = weight(rngs, (EMBED, "embed"), *heads)
        self.out = weight(rngs, *heads, (EMBED, "embed"))

    def __call__(self, x, scope):
        q = jnp.einsum("btd,dnh->btnh", x, self.q[...])
        k = jnp.einsum("btd,dnh->btnh", x, self.k[...])
        v = jnp.einsum("btd,dnh->btnh", x, self.v[...])
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), axis=-1)
        mixed = jnp.einsum("bnts,bsnh->btnh", scores, v)
        return x + jnp.einsum("btnh,nhd->btd", mixed, self.out[...])


class Routed(nnx.Module):
    """Probabilities of one example are as many values as the router's weight."""

    def __init__(self, rngs):
        self.router = weight(rngs, (EMBED, "embed"), (MLP, None))
        self.experts = weight(rngs, (MLP, "mlp"), (EMBED, "embed"))

    def __call__(self, x, scope):
        chances = scope.constrain(jax.nn.softmax(x @ self.router[...]), HIDDEN)
        chances = scope.constrain(jnp.cumsum(chances, axis=-1), HIDDEN)
        return x + chances @ self.experts[...]


@functools.cache
def audited(block: type, line: str, *, examples: int = 8, seq: int = SEQ):
    model = from_nnx(ends=Ends, block=block, num_layers=2)
    step = make_train_step(model, optax.sgd(0.1), line, devices=jax.devices()[:4])
    return audit(step, batch_shapes(examples, seq))


def on_line(report: AuditReport, source: str) -> list[Explained]:
    rows = [row for row in report.rows if row.collective.source == source]
    assert rows
    return rows


# Sequence parallel.

SEQUENCE = "tensor=4,sequence_parallel=true"


@pytest.mark.parametrize("line", ["tensor=4", SEQUENCE])
def test_what_a_sum_along_a_split_dim_moves_is_a_surprise(line):
    rows = on_line(audited(Summing, line), line_with(Summing.__call__, "cumsum"))
    assert {row.collective.kind for row in rows} == {"all-gather"}
    assert all(row.surprise for row in rows)
    assert all("inserted by GSPMD for reduce_window_sum" in row.reason for row in rows)


def test_a_constraint_on_its_line_does_not_ask_for_what_a_sum_exchanges():
    report = audited(SummingAnyhow, SEQUENCE)
    rows = on_line(report, line_with(SummingAnyhow.__call__, "cumsum"))
    assert "all-to-all" in {row.collective.kind for row in rows}
    assert all(row.surprise for row in rows)


def test_the_gathers_of_a_column_parallel_matmul_are_asked_for():
    report = audited(Summing, SEQUENCE)
    rows = on_line(report, line_with(Summing.__call__, "self.up"))
    words = "sequence gathered before a column-parallel matmul"
    gathers = [row for row in rows if row.collective.kind == "all-gather"]
    assert [row.reason for row in gathers] == [words, words]
    assert not any(row.surprise for row in rows)


# Sums of products.


def test_scores_summed_over_a_split_head_dim_are_a_surprise():
    report = audited(SplitHeadDim, "tensor=4", examples=2)
    source = line_with(SplitHeadDim.__call__, "btnh,bsnh->bnts")
    [row] = on_line(report, source)
    found = row.collective
    assert (found.kind, found.mesh_axes) == ("all-reduce", ("tensor",))
    output_bytes = 2 * SEQ * MLP * 4
    assert found.payload_bytes == 8 * output_bytes
    assert row.surprise
    assert "contracts a split dim of activations, 4.0 times the values" in row.reason
    mixing = line_with(SplitHeadDim.__call__, "bnts,bsnh->btnh")
    assert {row.collective.source for row in report.surprises} == {source, mixing}


def test_they_are_one_too_in_a_function_of_arrays():
    split = NamedSharding(mesh_of(data=2, tensor=4), P("data", None, None, "tensor"))
    heads = array(2, SEQ, HEADS, 8, sharding=split)
    report = audit(lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k), heads, heads)
    [row] = report.surprises
    assert row.collective.kind == "all-reduce"
    few = array(2, 8, HEADS, 8, sharding=split)
    assert not audit(
        lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k), few, few
    ).surprises


def test_a_sum_between_part_of_a_mesh_axis_is_a_surprise():
    mesh = mesh_of(tensor=8)
    split = NamedSharding(mesh, P(None, None, "tensor"))

    def scores(q, k):
        q, k = (x.reshape(2, SEQ, HEADS, 8) for x in (q, k))  # 8 parts of 4 heads.
        return jnp.einsum("btnh,bsnh->bnts", q, k)

    flat = array(2, SEQ, MLP, sharding=split)
    found = audit(scores, flat, flat).surprises
    [row] = [row for row in found if row.collective.kind == "all-reduce"]
    assert row.collective.mesh_axes is None
    assert "between devices that form no product of mesh axes" in row.reason


# Weights.


def test_an_activation_of_a_weights_size_is_not_called_that_weight():
    report = audited(Routed, "tensor=4", examples=1, seq=EMBED)
    rows = on_line(report, line_with(Routed.__call__, "cumsum"))
    gathered = [row for row in rows if row.collective.kind == "all-gather"]
    assert {row.collective.dims for row in gathered} == {((1, EMBED, MLP),)}
    assert all(row.surprise and "weight" not in row.reason for row in gathered)


def test_of_two_weights_of_one_size_the_one_that_moves_is_named():
    report = audited(Unconstrained, SEQUENCE)
    for name in ("up", "down"):
        source = line_with(Unconstrained.__call__, f"self.{name}[")
        rows = [row for row in on_line(report, source) if row.surprise]
        words = f"nobody asked for this: all of the weight 'blocks.{name}' moves"
        assert rows
        assert all(row.reason.startswith(words) for row in rows)


# What XLA joins.


def test_each_part_of_what_xla_joins_is_explained():
    report = audited(Summing, SEQUENCE)
    joined = [row for row in report.rows if len(row.collective.paths) > 1]
    assert joined
    assert all(" and " in row.reason and not row.surprise for row in joined)


def test_a_joined_path_is_read_as_the_paths_of_its_parts():
    row = audited(Summing, "tensor=4").rows[0].collective
    for path, parts in {
        "jit(f)/jvp(a)/psum": ("jit(f)/jvp(a)/psum",),
        "jit(f)/(jvp()/reduce_sum:transpose(jvp())/add)": (
            "jit(f)/jvp()/reduce_sum",
            "jit(f)/transpose(jvp())/add",
        ),
        "jit(f)/(dot:dot)": ("jit(f)/dot",),
        "": ("",),
    }.items():
        assert replace(row, op_path=path).paths == parts


def test_a_surprise_stays_one_beside_what_it_is_joined_with():
    row = audited(Summing, "tensor=4").rows[0].collective
    subject = Subject(
        function=None, arguments=(), mesh=mesh_of(tensor=4), platform="cpu"
    )
    asked, unasked = "jit(f)/all_gather", "jit(f)/dot_general"
    for path, surprise in {
        asked: False,
        unasked: True,
        "jit(f)/(all_gather:dot_general)": True,
    }.items():
        gather = replace(row, kind="all-gather", op_path=path, uses=())
        found = explain(gather, subject, Evidence.from_trace([], subject.mesh_shape))
        assert found.surprise == surprise
        assert found.reason.startswith("nobody asked for this") == surprise


def joins(target: str, line: str, mark) -> pytest.param:
    return pytest.param(target, line, marks=[mark])


PIPELINE = "data=2,stage=2,tensor=2,microbatches=4,sequence_parallel=true"
ZERO_2 = "data=2,fsdp=2,tensor=2,microbatches=2,zero=2,sequence_parallel=true"


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, line",
    [
        joins("tpu:v5p:2x2x2", ZERO_2, needs_tpu_compiler),
        joins("tpu:v5p:2x2x2", PIPELINE, needs_tpu_compiler),
        joins("gpu:h100:1x8", PIPELINE, needs_gpu_compiler),
    ],
)
def test_sums_that_xla_joins_or_takes_out_of_a_loop_are_no_surprise(target, line):
    report = step_on(target, line)
    assert report.rows
    assert not report.surprises


# How arrays are followed.

BATCH = ["d", "", ""]


@pytest.mark.parametrize(
    "function, before, after",
    [
        (lambda x: x.reshape(8, 16, 4, 8), P(None, None, "tensor"), ["", "", "t", ""]),
        (lambda x: x.reshape(128, 32), P("data"), ["d", ""]),
        (lambda x: x.reshape(8, 2, 8, 32), P(None, None, "tensor"), ["", "", "", "t"]),
        (lambda x: x.reshape(8, 1, 16, 32), P("data", "tensor"), ["d", "", "t", ""]),
        (
            lambda x: jnp.concatenate([x, x], axis=2),
            P("data", None, "tensor"),
            ["d", "", ""],
        ),
        (lambda x: x @ jnp.ones((32, 4)), P("data", None, "tensor"), ["d", "", ""]),
    ],
)
def test_a_split_is_followed_through_what_cuts_joins_and_multiplies(
    function, before, after
):
    x = array(8, 16, 32)
    sharding = NamedSharding(mesh_of(data=2, tensor=4), before)
    found = operations(jax.jit(function).trace(x).jaxpr, [sharding])
    [last] = found[-1].results
    assert ["".join(axis[0] for axis in axes) for axes in last.split] == after


@pytest.mark.parametrize("carried", [True, False])
def test_a_gather_of_what_a_loop_carries_is_asked_for_of_what_it_stacks_not(carried):
    """GSPMD may carry an array split, and gathers it for the constraint behind."""
    mesh = mesh_of(data=2, tensor=4)
    whole = NamedSharding(mesh, P())

    def function(x, weights):
        def body(x, weight):
            return jnp.tanh(x @ weight), weight * 2

        x, stacked = jax.lax.scan(body, x, weights)
        found = x if carried else stacked
        return jax.lax.with_sharding_constraint(found, whole)

    shapes = array(8, 16), array(3, 16, 16)
    given = [whole, whole]
    program = jax.jit(function).trace(*shapes).jaxpr
    [found] = constrained_arrays(operations(program, given))
    assert found.maker.primitive.name == "scan"
    assert found.asks_for("all-gather", ("tensor",)) == carried
    assert not found.asks_for("collective-permute", ("tensor",))
