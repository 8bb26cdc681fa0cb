"""A DLRM refuses sizes that do not fit, and its memory is known before it compiles."""

import importlib.util
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, absent_mesh, audit, embedding_tables, lint, make_train_step
from meshpar.model.inputs import MissingInputError
from meshpar.models.presets import build, configure
from meshpar.tables import RowwiseAdagrad, Table, with_tables
from meshpar.tables.memory import _residual_bytes

needs_aot = pytest.mark.skipif(
    not (
        importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax_plugins")
    ),
    reason="compilers for absent targets are not installed (extra aot)",
)


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"dim": 8}, ("model.bottom_width_mismatch", "bottom=(32, 16)", "dim=8")),
        ({"bottom": (0, 16)}, ("value.not_whole_number", "bottom=(0, 16)", 0)),
        (
            {"interaction": "sum"},
            ("model.unknown_interaction", "interaction='sum'", "dot", "cross"),
        ),
        ({"top_layers": 0}, ("value.below_one", "top_layers=0", 1)),
        ({"features": 2.0}, ("value.not_whole_number", "features=2.0")),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(changes, refusal, refuses):
    with refuses(*refusal):
        configure("tiny-dlrm", **changes)


def test_the_benchmarks_model_has_as_many_parameters_as_its_widths_say():
    """MLPerf Training 3.0: 512-256-128, 3 crosses of rank 512, 1024-1024-512-256-1."""
    widths = [(13, 512), (512, 256), (256, 128), (27 * 128, 1024), (1024, 1024)]
    widths += [(1024, 512), (512, 256), (256, 1)]
    dense = sum((below + 1) * above for below, above in widths)
    crosses = 3 * (2 * 27 * 128 * 512 + 27 * 128)
    assert build("dlrm-v2").num_parameters == dense + crosses


@pytest.mark.parametrize("preset", ["tiny-dlrm", "tiny-dlrm-cross", "dlrm-v2"])
def test_a_preset_is_clean_under_the_rules_of_a_layout(preset):
    assert lint(build(preset), Layout.parse("fsdp=2,tensor=2")).findings == ()


def test_what_has_a_gradient_is_hidden_from_all_but_the_embedding(refuses):
    """Else a part of its gradient would be missing, and nobody told."""
    model = build("tiny-dlrm")

    def head(params, x, batch, scope):
        total, weight = model.head(params, x, batch, scope)
        return total + batch["embedded"].sum(), weight

    batch = {
        "numbers": np.zeros((8, 4), np.float32),
        "embedded": np.zeros((8, 6, 16), np.float32),
        "clicks": np.zeros(8, np.float32),
    }
    for layout in ("data=2", "stage=2,microbatches=2"):
        step = make_train_step(
            replace(model, head=head),
            optax.sgd(0.1),
            layout,
            devices=jax.devices()[:2],
        )
        embedded = "batch['embedded']"
        with refuses("batch.missing_array", embedded, kind=MissingInputError):
            step.compile(batch)


def step_of(layout, rows, examples, bag):
    tables = [
        Table(name=f"id{at}", rows=rows // (1 + at % 3), dim=128, bag=bag)
        for at in range(26)
    ]
    dense = make_train_step(
        build("dlrm-v2"),
        optax.adam(1e-3),
        layout,
        mesh=absent_mesh(Layout.parse(layout)),
    )
    step = with_tables(dense, embedding_tables(tables, RowwiseAdagrad(0.01)))
    batch = {
        f"id{at}": jax.ShapeDtypeStruct((examples, bag), np.int32) for at in range(26)
    }
    batch["numbers"] = jax.ShapeDtypeStruct((examples, 13), np.float32)
    batch["clicks"] = jax.ShapeDtypeStruct((examples,), np.float32)
    return step, batch


def test_residuals_of_a_parameters_shape_are_counted_too():
    """Of 16 examples as of any number: bytes grow evenly with them."""
    model = build("tiny-dlrm", features=1, bottom=(16, 16))

    def kept(examples):
        batch = {
            "numbers": jax.ShapeDtypeStruct((examples, 4), np.float32),
            "clicks": jax.ShapeDtypeStruct((examples,), np.float32),
        }
        return _residual_bytes(model, batch, {"embedded": (1, 16)})

    assert kept(32) - kept(16) == kept(48) - kept(32) > 0


@needs_aot
@pytest.mark.slow
@pytest.mark.parametrize("target", ["gpu:h100:1x8", "tpu:v5p:2x2x2"])
def test_memory_is_within_a_tenth_of_the_compiled_program(target):
    step, batch = step_of("data=8", 4_000_000, 8192, 4)
    compiled = audit(step, batch, target=target).compiled_memory
    predicted = step.predicted_memory(batch)
    assert predicted.total_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)
    states = predicted.model_bytes + predicted.table_bytes
    assert compiled.alias_bytes == pytest.approx(states, rel=1e-3)
    if target.startswith("gpu"):  # TPUs pad what is narrower than a tile.
        assert predicted.temp_bytes == pytest.approx(compiled.temp_bytes, rel=0.1)
