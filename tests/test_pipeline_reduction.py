"""Large gradients are reduced in slices: the same sums, and no second copy of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshpar import Layout
from meshpar.audit.collectives import find_collectives
from meshpar.audit.hlo import parse_program
from meshpar.parallel.pipeline import reduction
from meshpar.parallel.zero import Stored
from meshpar.train.state import without_optimizer
from tests.marks import slow
from tests.pipelined import (
    assert_close,
    assert_equal_to_plain,
    batch_of,
    mlp_of,
    plain,
    state_of,
    step_of,
)


def gradients_of(num_bytes, layers):
    return {"a": jax.ShapeDtypeStruct((layers, num_bytes // layers), jnp.int8)}


@pytest.mark.parametrize(
    ("num_bytes", "layers", "number"),
    [
        (1, 1, 1),
        (64, 8, 1),
        (65 * 8, 8, 8),
        (128, 8, 2),
        (192, 6, 3),
        (10**4, 5, 5),
        (37 * 8, 37, 1),
    ],
)
def test_slices_are_as_few_as_keep_each_small(monkeypatch, num_bytes, layers, number):
    monkeypatch.setattr(reduction, "SLICE_BYTES", 64)
    assert reduction.num_slices(gradients_of(num_bytes, layers)) == number


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "data=2,stage=2,microbatches=3",
        "fsdp=2,stage=2,microbatches=3",  # scattered: results are smaller
        "data=2,stage=2,tensor=2,schedule=interleaved_1f1b,chunks=2,microbatches=2",
    ],
)
def test_gradients_reduced_in_slices_equal_those_of_the_model_alone(monkeypatch, line):
    monkeypatch.setattr(reduction, "SLICE_BYTES", 1)
    assert_equal_to_plain(mlp_of(8 if "chunks" in line else 4), line)


@pytest.mark.parametrize(
    ("slice_bytes", "executions"), [(1, {2}), slow(reduction.SLICE_BYTES, set())]
)
def test_each_slice_is_one_reduction_of_a_layer(monkeypatch, slice_bytes, executions):
    monkeypatch.setattr(reduction, "SLICE_BYTES", slice_bytes)
    line, model = "data=2,stage=2,microbatches=3", mlp_of(4)
    step = step_of(model, line)
    subject = step.audit_subject(batch_of(), gradients_only=True)
    compiled = subject.lower().compile(dict(subject.compiler_options))
    rows = find_collectives(
        parse_program(compiled.as_text()), Layout.parse(line).mesh_shape
    )
    in_loops = [row for row in rows if row.kind == "all-reduce" and row.in_loop]
    assert {row.executions for row in in_loops} == executions
    state = without_optimizer(state_of(step, model))
    value, _, gradients = compiled(state, step.place(batch_of()))
    wanted_value, wanted = plain(model)
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    assert_close(step.in_layer_order(gradients), wanted)


def test_what_is_scattered_along_the_layers_is_reduced_whole(monkeypatch):
    monkeypatch.setattr(reduction, "SLICE_BYTES", 64)
    sizes = []

    def reduced(_, gradients):
        sizes.append([len(x) for x in gradients])
        return [2 * x for x in gradients]

    def stored(spec):
        whole = PartitionSpec(None)
        return Stored(
            spec=spec,
            used_spec=whole,
            loop_spec=whole,
            gradient_spec=whole,
            compute_dtype=jnp.float32,
        )

    layouts = [stored(PartitionSpec("fsdp")), stored(PartitionSpec(None))]
    layers = jnp.arange(32, dtype=jnp.float32)
    results = reduction.along_first_dim(reduced, layouts, [layers, layers])
    assert all((x == 2 * layers).all() for x in results)
    assert (sizes[0], sizes[-1]) == ([32], [8])
