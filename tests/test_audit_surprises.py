"""Planted mistakes: each is reported with the line of this file that makes it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import FSDP_TENSOR, make_mesh, make_train_step
from meshpar.audit.report import audit
from meshpar.audit.targets import TargetError
from meshpar.models.presets import build
from meshpar.parallel import tensor
from tests.marks import slow
from tests.test_audit_counts import array, mesh_of

SIZES = {"data": 2, "tensor": 4}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of(**SIZES)


def line_with(function: Callable, words: str) -> str:
    """`file:line` of the line of a function that contains words."""
    function = inspect.unwrap(function)  # of the checks of its shapes
    lines, first = inspect.getsourcelines(function)
    [index] = [index for index, line in enumerate(lines) if words in line]
    return f"{inspect.getsourcefile(function)}:{first + index}"


# Surprises.


def test_a_weight_split_on_the_wrong_dim_is_gathered_and_reported(mesh):
    def multiply(x, w):
        y = x @ w  # The weight is split by columns, but the result must be whole.
        return lax.with_sharding_constraint(y, NamedSharding(mesh, P("data")))

    report = audit(
        multiply,
        array(16, 48, sharding=NamedSharding(mesh, P("data"))),
        array(48, 96, sharding=NamedSharding(mesh, P(None, "tensor"))),
    )
    [row] = report.surprises
    assert (row.collective.kind, row.collective.mesh_axes) == (
        "all-gather",
        ("tensor",),
    )
    assert row.collective.payload_bytes == 48 * 96 * 4
    assert row.collective.source == line_with(multiply, "x @ w")
    assert row.reason.startswith("nobody asked for this: inserted by GSPMD for dot")


@pytest.fixture
def cached_small_programs():
    """JAX's persistent cache, which here keeps programs of any compile time."""
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, 0)
    yield
    jax.config.update(option, before)


@pytest.mark.usefixtures("cached_small_programs")
def test_lines_are_those_of_the_code_that_stands_though_the_cache_has_older(
    mesh, tmp_path
):
    source = tmp_path / "edited.py"
    shapes = (
        array(16, 48, sharding=NamedSharding(mesh, P("data"))),
        array(48, 112, sharding=NamedSharding(mesh, P(None, "tensor"))),
    )
    for line in (2, 5):
        code = (
            "\n" * (line - 2)
            + "def multiply(x, w):\n    return constrained(dot(x, w))\n"
        )
        names = {
            "dot": lax.dot,
            "constrained": lambda y: lax.with_sharding_constraint(
                y, NamedSharding(mesh, P("data"))
            ),
        }
        exec(compile(code, str(source), "exec"), names)
        [row] = audit(names["multiply"], *shapes).surprises
        assert row.collective.source == f"{source}:{line}"


def test_a_row_split_weight_for_a_column_split_result_is_a_surprise(mesh):
    def multiply(x, w):
        y = x @ w
        return lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", "tensor")))

    report = audit(
        multiply,
        array(16, 48, sharding=NamedSharding(mesh, P("data"))),
        array(48, 96, sharding=NamedSharding(mesh, P("tensor"))),
    )
    [row] = report.surprises
    assert row.collective.payload_bytes == 48 * 96 * 4 // 4
    assert row.collective.source == line_with(multiply, "x @ w")


def test_what_the_caller_expects_is_no_surprise(mesh):
    def multiply(x, w):
        return lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))

    report = audit(
        multiply,
        array(16, 48, sharding=NamedSharding(mesh, P("data"))),
        array(48, 96, sharding=NamedSharding(mesh, P(None, "tensor"))),
        expected={"tensor": {"all-gather": "the weight is small"}},
    )
    assert [row.reason for row in report.rows] == ["the weight is small"]
    assert not report.surprises


def test_rules_that_store_a_weight_otherwise_than_it_is_used_are_reported():
    rules = FSDP_TENSOR.with_rules(mlp=None)
    rules = replace(rules, parameters={**rules.parameters, "mlp": "tensor"})
    step = make_train_step(
        build("test", layers=2),
        optax.sgd(1e-3),
        "tensor=2",
        rules=rules,
        devices=jax.devices()[:2],
    )
    rows = audit(step, batch(16, 16)).surprises
    # XLA of jax 0.12 gathers the other weight too, in the backward.
    assert rows
    assert {(row.collective.kind, row.collective.executions) for row in rows} == {
        ("all-gather", 2)
    }
    moved = [row for row in rows if "all of the weight 'blocks.mlp.down'" in row.reason]
    [found] = [row.collective for row in moved]
    assert found.mesh_axes == ("tensor",)
    assert found.source == line_with(tensor.row_parallel, "jnp.einsum(dims, x, weight)")


def batch(rows: int, seq: int) -> dict:
    tokens = array(rows, seq, dtype=jnp.int32)
    return {"tokens": tokens, "targets": tokens, "weights": array(rows, seq)}


# Hazards.


def test_a_permute_in_a_branch_is_a_hazard(mesh):
    def local(x, chosen):
        def shifted(x):
            return lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)])

        return lax.cond(chosen[0] > 0, shifted, lambda x: x * 4, x)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    report = audit(mapped, array(16, 32), array(2, dtype=jnp.int32), mesh=mesh)
    [hazard] = report.hazards
    assert (hazard.kind, hazard.source) == (
        "divergent_permute",
        line_with(local, "lax.ppermute"),
    )
    assert "select its result with jnp.where" in hazard.message
    assert report.rows


def test_a_permute_in_a_loop_is_no_hazard(mesh):
    def local(x):
        def shift(x, _):
            return lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)]), None

        return lax.scan(shift, x, length=3)[0]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    report = audit(mapped, array(16, 32), mesh=mesh)
    assert not report.hazards
    assert [row.collective.executions for row in report.rows] == [3]


def summed_over_data(x):
    return lax.psum(x, "data")


def in_a_branch(x):
    return lax.cond(x[0, 0] > 0, summed_over_data, lambda x: summed_over_data(x * 2), x)


def in_a_loop(x):
    def half(carried):
        return lax.pcast(summed_over_data(carried) / 8, "data", to="varying")

    return lax.while_loop(lambda carried: carried[0, 0] > 1, half, x)


@pytest.mark.parametrize("local", [in_a_branch, in_a_loop])
def test_a_sum_that_devices_of_its_group_may_leave_out_is_a_hazard(local, mesh):
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    hazards = audit(mapped, array(16, 32), mesh=mesh).hazards
    assert {hazard.kind for hazard in hazards} == {"divergent_collective"}
    [hazard] = hazards
    assert hazard.source == line_with(summed_over_data, "lax.psum")
    assert "over 'data'" in hazard.message and "along 'data'" in hazard.message


def test_a_permute_in_a_loop_that_devices_leave_apart_is_a_hazard(mesh):
    def local(x):
        def swapped(x):
            return lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)]) / 2

        return lax.while_loop(lambda x: x[0, 0] > 1, swapped, x)

    split = P("data", "tensor")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
    [hazard] = audit(mapped, array(16, 32), mesh=mesh).hazards
    assert hazard.kind == "divergent_collective" and "ppermute" in hazard.message


def test_a_loop_that_carries_nothing_and_a_mesh_axis_of_one_are_no_hazard():
    def local(x):
        lax.while_loop(lambda _: False, lambda nothing: nothing, ())
        return in_a_branch(x)

    alone = make_mesh("data=1,tensor=8")
    mapped = jax.shard_map(local, mesh=alone, in_specs=P("data"), out_specs=P("data"))
    assert not audit(mapped, array(16, 32), mesh=alone).hazards


@pytest.mark.parametrize("chosen_by", ["data", None])
def test_a_sum_that_all_of_its_group_reach_is_no_hazard(chosen_by, mesh):
    """All decide alike, or groups decide apart, but each as one."""

    def local(x):
        over = "tensor" if chosen_by else "data"
        first = lax.axis_index(chosen_by) == 0 if chosen_by else lax.pmax(x, "data") > 0
        return lax.cond(
            jnp.ravel(first)[0],
            lambda x: lax.psum(x, over),
            lambda x: lax.psum(x * 2, over),
            x,
        )

    split = P("data", "tensor")
    kept = P("data") if chosen_by else P(None, "tensor")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=kept)
    report = audit(mapped, array(16, 32), mesh=mesh)
    assert not report.hazards and report.rows


def over_data(local: Callable, mesh: Mesh) -> Callable:
    """Manual over data; tensor is left to GSPMD."""
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )


def picked_after_constraint(logits, targets):
    here = jax.sharding.get_abstract_mesh()
    logits = lax.with_sharding_constraint(
        logits, NamedSharding(here, P(None, "tensor"))
    )
    return jnp.take_along_axis(logits * 2, targets[:, None], axis=-1)


def test_a_gather_of_split_logits_in_a_partly_manual_region_is_a_hazard(mesh):
    report = audit(
        over_data(picked_after_constraint, mesh),
        array(16, 64),
        array(16, dtype=jnp.int32),
        mesh=mesh,
    )
    [hazard] = report.hazards
    assert (hazard.kind, hazard.fatal) == ("sharded_gather", True)
    assert hazard.source == line_with(picked_after_constraint, "take_along_axis")
    # This one compiles, in a process of its own: so there is a report beside it.
    assert not report.problem
    assert report.rows


@pytest.fixture(params=["traced", slow("compiled")])
def hazardous(request, monkeypatch):
    """XLA may abort on the program: traced alone, the child that compiles it dies."""

    def dies(*_, **options):
        raise TargetError("not compiled", key="audit.compiler_failed")

    if request.param == "traced":
        monkeypatch.setattr(sys.modules[audit.__module__], "compile_for", dies)


@pytest.mark.usefixtures("hazardous")
def test_it_is_one_too_where_the_weight_is_split_by_its_argument(mesh):
    def loss(x, targets, table):
        def local(x, targets, table):
            logits = jnp.einsum("BD,VD->BV", x, table)
            return jnp.take_along_axis(logits, targets[:, None], axis=-1)

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("data"), P("data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )(x, targets, table)

    split = NamedSharding(mesh, P("tensor"))
    report = audit(
        loss,
        array(16, 32),
        array(16, dtype=jnp.int32),
        array(64, 32, sharding=split),
    )
    [hazard] = report.hazards
    assert hazard.kind == "sharded_gather"
    assert hazard.source == line_with(loss, "take_along_axis")


@pytest.mark.usefixtures("hazardous")
@pytest.mark.parametrize("from_slices", [True, False])
def test_it_is_one_too_inside_a_loop(from_slices, mesh):
    def local(logits, targets):
        here = jax.sharding.get_abstract_mesh()
        split = NamedSharding(here, P(None, None, "tensor"))
        logits = lax.with_sharding_constraint(logits, split)

        def body(total, step):
            part = step if from_slices else logits[0]
            return total + jnp.take_along_axis(part, targets[:, None], axis=-1), None

        return lax.scan(body, jnp.zeros((8, 1)), logits)[0]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(None, "data"), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    report = audit(mapped, array(3, 16, 64), array(16, dtype=jnp.int32), mesh=mesh)
    assert {hazard.kind for hazard in report.hazards} == {"sharded_gather"}
    assert report.hazards[0].source == line_with(local, "take_along_axis")


@pytest.mark.usefixtures("hazardous")
@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.reshape(2, 4, 64).reshape(8, 64),
        lambda logits: logits.T.T + 1,
        lambda logits: jnp.exp(logits - logits.max(axis=-1, keepdims=True)),
        lambda logits: (logits[:, None] * jnp.ones((8, 3, 64)))[:, 0],
        lambda logits: logits.astype(jnp.bfloat16)[:, None].squeeze(1),
    ],
)
def test_it_is_one_too_after_what_keeps_the_logits_split(change, mesh):
    def local(logits, targets):
        here = jax.sharding.get_abstract_mesh()
        split = NamedSharding(here, P(None, "tensor"))
        logits = change(lax.with_sharding_constraint(logits, split))
        return jnp.take_along_axis(logits, targets[:, None], axis=-1)

    arguments = (array(16, 64), array(16, dtype=jnp.int32))
    report = audit(over_data(local, mesh), *arguments, mesh=mesh)
    assert [hazard.kind for hazard in report.hazards] == ["sharded_gather"]


def test_it_is_none_where_the_logits_are_whole_or_compared(mesh):
    def compared(logits, targets):
        here = jax.sharding.get_abstract_mesh()
        split = NamedSharding(here, P(None, "tensor"))
        logits = lax.with_sharding_constraint(logits, split)
        return jnp.sum(logits * jax.nn.one_hot(targets, 64), axis=-1)

    def whole(logits, targets):
        return jnp.take_along_axis(logits, targets[:, None], axis=-1)

    for local in (compared, whole):
        arguments = (array(16, 64), array(16, dtype=jnp.int32))
        assert not audit(over_data(local, mesh), *arguments, mesh=mesh).hazards


REDUCTIONS = {
    "psum": lambda x: lax.psum(x, "data"),
    "pmax": lambda x: lax.pmax(x, "data"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
    "pmean": lambda x: lax.pmean(x, "data"),
}


@pytest.mark.usefixtures("hazardous")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_bfloat16_reduction_in_a_partly_manual_region_is_a_hazard(name, mesh):
    reduce = REDUCTIONS[name]
    mapped = over_data(reduce, mesh)
    report = audit(mapped, array(16, 32, dtype=jnp.bfloat16), mesh=mesh)
    [hazard] = report.hazards
    assert (hazard.kind, hazard.fatal) == ("half_all_reduce", True)
    assert hazard.source == line_with(reduce, f'"{name}"')
    assert "reduce in float32" in hazard.message


@pytest.mark.parametrize(
    "dtype, local",
    [
        (jnp.float32, REDUCTIONS["psum"]),
        (jnp.float16, REDUCTIONS["psum"]),
        (jnp.bfloat16, lambda x: lax.all_gather(x, "data", tiled=True)),
        (jnp.bfloat16, lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)])),
    ],
)
def test_other_types_and_collectives_are_none_and_compile(dtype, local, mesh):
    report = audit(over_data(local, mesh), array(16, 32, dtype=dtype), mesh=mesh)
    assert not report.hazards
    assert not report.problem


def test_a_bfloat16_sum_is_none_where_every_mesh_axis_is_manual(mesh):
    mapped = jax.shard_map(
        lambda x: lax.psum(x, "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    report = audit(mapped, array(16, 32, dtype=jnp.bfloat16), mesh=mesh)
    assert not report.hazards
    assert [row.collective.kind for row in report.rows] == ["all-reduce"]
