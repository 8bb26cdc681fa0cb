"""A step is compiled with its platform's options, which a caller may change."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Layout, absent_mesh, audit, batch_shapes, make_train_step
from meshpar.hardware.platforms import COMPILER_OPTIONS, compiler_options_for
from tests.pipelined import mlp_of
from tests.test_audit_targets import needs_tpu_compiler

ASYNC = "xla_tpu_enable_sparse_core_collective_offload_all_gather"


def test_every_row_has_its_reason_and_stands_once():
    rows = [
        (row.platform, row.name, row.if_prefetching, row.if_sequence_parallel)
        for row in COMPILER_OPTIONS
    ]
    assert len(set(rows)) == len(rows)
    assert all(row.why and row.platform in ("gpu", "tpu") for row in COMPILER_OPTIONS)


def test_a_given_value_counts_and_none_leaves_a_row_out():
    assert compiler_options_for("tpu")[ASYNC] is True
    assert compiler_options_for("tpu", {ASYNC: False})[ASYNC] is False
    assert ASYNC not in compiler_options_for("tpu", {ASYNC: None})
    assert compiler_options_for("cpu", {"a": 1, "b": None}) == {"a": 1}
    assert compiler_options_for("cpu") == {}


@pytest.mark.parametrize("given", ["xla_a=1", {1: True}])
def test_options_that_are_no_names_and_values_are_refused(refuses, given):
    with refuses("step.wrong_compiler_options", f"compiler_options={given!r}"):
        compiler_options_for("cpu", given)


def step_on(mesh=None, layout="fsdp=8", **options):
    devices = None if mesh else jax.devices()[: Layout.parse(layout).num_devices]
    given = dict(mesh=mesh, devices=devices, compiler_options=options)
    return make_train_step(mlp_of(1), optax.sgd(0.1), layout, **given)


def test_an_absent_targets_options_are_those_of_its_platform():
    batch = batch_shapes(8, 16)
    here = step_on(xla_cpu_enable_fast_math=False)
    assert here.compiler_options == {"xla_cpu_enable_fast_math": False}
    of_target = here.audit_subject(batch, platform="tpu").compiler_options
    assert of_target == compiler_options_for("tpu")
    # A step without devices is made for its target, and so are its options.
    absent = step_on(absent_mesh("fsdp=8"), **{ASYNC: None, "a": 1})
    of_target = absent.audit_subject(batch, platform="tpu").compiler_options
    assert of_target == compiler_options_for("tpu", {ASYNC: None, "a": 1})


def test_the_report_names_what_the_program_was_compiled_with():
    step = step_on(layout="data=1", xla_cpu_enable_fast_math=False)
    report = audit(step, batch_shapes(8, 16))
    assert report.to_json()["compiler_options"] == {"xla_cpu_enable_fast_math": False}
    without = {"xla_cpu_enable_fast_math": None}
    report = audit(step, batch_shapes(8, 16), compiler_options=without)
    assert report.compiler_options == {}


def one_ahead(weights, x):
    """A scan that gathers the next layer's weights, and scatters the last gradient."""

    def layer(carry, at):
        x, whole, gradient = carry
        ahead = lax.all_gather(weights[at], "fsdp", axis=0, tiled=True)
        part = lax.psum_scatter(gradient, "fsdp", scatter_dimension=0, tiled=True)
        y = jnp.tanh(x @ whole) @ whole.T
        return (y, ahead, (y.T @ x).astype(jnp.float32)), part

    first = lax.all_gather(weights[0], "fsdp", axis=0, tiled=True)
    nothing = jnp.zeros(first.shape, jnp.float32)
    layers = jnp.arange(1, len(weights))
    (x, _, _), parts = lax.scan(layer, (x, first, nothing), layers)
    return x, parts


@needs_tpu_compiler
@pytest.mark.slow
def test_tpus_gather_and_scatter_beside_matmuls_with_their_rows_and_not_without():
    mesh = absent_mesh("fsdp=8")
    split, examples = PartitionSpec(None, "fsdp"), PartitionSpec("fsdp")
    function = jax.shard_map(
        one_ahead,
        mesh=mesh,
        in_specs=(split, examples),
        out_specs=(examples, split),
        check_vma=False,
    )
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((7, 4096, 4096), split), ((8 * 8192, 4096), examples))
    ]

    def hidden(options):
        report = audit(
            function,
            *shapes,
            mesh=mesh,
            target="tpu:v5p:2x2x2",
            compiler_options=options,
        )
        return {total.kind: total.hidden_share for total in report.overlap()}

    rows = compiler_options_for("tpu")
    # Six of seven gathers are in the loop.
    assert hidden(rows) == {
        "all-gather": pytest.approx(6 / 7),
        "reduce-scatter": pytest.approx(1),
    }
    assert hidden({}) == {"all-gather": 0, "all-reduce": 0}
    offload = ASYNC.removesuffix("_all_gather")
    without = {**rows, f"{offload}_nd_reduce_scatter": None}
    assert hidden(without)["all-reduce"] == 1
    del without[f"{offload}_3d_all_gather"]
    assert hidden(without)["all-gather"] == 0
