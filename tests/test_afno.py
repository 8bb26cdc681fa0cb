"""A forecast on a split grid is that on a whole one, and says what it cannot be."""

import jax
import optax
import pytest

from meshpar import Layout, audit, default_rules, lint, make_train_step
from meshpar.models.presets import build, configure
from tests.zoo import grids
from tests.zoo.beside import deviating, deviating_gradients, plain_run, step_of

ENTRIES = {
    "whole": grids.AFNO,
    "rows": grids.ROWS_SPLIT,
    "columns": grids.COLUMNS_SPLIT,
    "both": grids.BOTH_SPLIT,
    "beside_tensor": grids.BESIDE_TENSOR,
}
plain = plain_run(grids.AFNO)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [
        ("both", "context=2,tensor=4"),
        ("whole", "data=8"),
        ("whole", "data=2,fsdp=2,tensor=2"),
        ("whole", "data=2,stage=2,tensor=2,microbatches=4"),
        ("whole", "fsdp=2,stage=2,microbatches=4,schedule=1f1b"),
        ("rows", "data=2,tensor=4,microbatches=2"),
        ("rows", "fsdp=4,tensor=2,remat=full"),
        ("columns", "fsdp=4,tensor=2"),
        ("both", "data=2,context=2,tensor=2,remat=selective"),
        ("both", "fsdp=2,context=2,tensor=2,zero=2"),
        ("beside_tensor", "context=4,tensor=2"),
    ],
)
def test_an_afno_trains_as_plain_flax_and_optax_train_it(name, layout):
    assert not deviating(ENTRIES[name], layout, plain())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [("both", "context=2,tensor=4"), ("beside_tensor", "context=4,tensor=2")],
)
def test_a_step_has_plain_gradients_and_sends_halos_and_transforms_alone(
    name, layout, monkeypatch
):
    entry = ENTRIES[name]
    step = step_of(entry, layout, layers=1, optimizer=optax.sgd(1.0))
    report, program = audited(step, entry.batch(), monkeypatch)
    assert not report.surprises
    assert not [row for row in report.rows if row.collective.kind == "all-gather"]
    reasons = {row.reason for row in report.rows}
    assert "asked by fft: a split dim made whole, or back" in reasons
    assert "asked by a convolution: halo of the grid" in reasons
    assert not deviating_gradients(entry, step, program)


def audited(step, batch, monkeypatch):
    """An audit's report, and the program that it compiled."""
    programs, compile_ = [], jax.stages.Lowered.compile

    def compiled(*given):
        programs.append(compile_(*given))
        return programs[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    report = audit(step, batch)
    [program] = programs
    return report, program


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"height": 30}, ("model.patch_indivisible", "height=30", "patch=4")),
        ({"blocks": 3}, ("model.blocks_indivisible", "embed=64", "blocks=3")),
        ({"window": 4}, ("model.even_window", "window=4")),
        ({"modes": 10}, ("model.too_many_modes", "modes=10", 16, 9)),
        ({"layers": 0}, ("value.below_one", "layers=0", 1)),
        ({"threshold": -1.0}, ("value.negative", "threshold=-1.0", 0)),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(refuses, changes, refusal):
    with refuses(*refusal):
        configure("tiny-afno", **changes)


@pytest.mark.parametrize(
    "layout, rules, refusal",
    [
        (
            "tensor=8",
            {"height": "tensor", "mlp": None},
            ("layout.indivisible", "'height'", 4, 8),
        ),
        (
            "tensor=2",
            {"height": "tensor"},
            ("rules.claimed_twice", "'height'", "'mlp'"),
        ),
        (
            "stage=2,tensor=2,microbatches=2",
            {"height": "tensor", "mlp": None},
            ("layout.stages_of_split_space", "tensor=2", "stage=2"),
        ),
    ],
)
def test_a_grid_that_cannot_be_split_so_is_refused(refuses, layout, rules, refusal):
    layout = Layout.parse(layout)
    with refuses(*refusal):
        step = make_train_step(
            grids.AFNO.model(2),
            optax.sgd(1.0),
            layout,
            rules=default_rules(layout).with_rules(**rules),
            devices=jax.devices()[: layout.num_devices],
        )
        audit(step, grids.AFNO.batch())


@pytest.mark.parametrize("preset", ["tiny-afno", "afno-quarter-degree"])
def test_a_preset_is_clean_under_the_rules_of_a_layout(preset):
    assert lint(build(preset), Layout.parse("fsdp=2,tensor=2")).findings == ()
