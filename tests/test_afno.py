"""A forecast on a split grid is that on a whole one, and says what it cannot be."""

import jax
import optax
import pytest

from meshpar import (
    InputError,
    Layout,
    RuleError,
    audit,
    default_rules,
    lint,
    make_train_step,
)
from meshpar.models.presets import build, configure
from tests.marks import slow
from tests.zoo import grids
from tests.zoo.beside import deviating, plain_run, step_of

ENTRIES = {
    "whole": grids.AFNO,
    "rows": grids.ROWS_SPLIT,
    "columns": grids.COLUMNS_SPLIT,
    "both": grids.BOTH_SPLIT,
    "beside_tensor": grids.BESIDE_TENSOR,
}
plain = plain_run(grids.AFNO)


@pytest.mark.parametrize(
    "name, layout",
    [
        ("both", "context=2,tensor=4"),
        slow("whole", "data=8"),
        slow("whole", "data=2,fsdp=2,tensor=2"),
        slow("whole", "data=2,stage=2,tensor=2,microbatches=4"),
        slow("whole", "fsdp=2,stage=2,microbatches=4,schedule=1f1b"),
        slow("rows", "data=2,tensor=4,microbatches=2"),
        slow("rows", "fsdp=4,tensor=2,remat=full"),
        slow("columns", "fsdp=4,tensor=2"),
        slow("both", "data=2,context=2,tensor=2,remat=selective"),
        slow("both", "fsdp=2,context=2,tensor=2,zero=2"),
        slow("beside_tensor", "context=4,tensor=2"),
    ],
)
def test_an_afno_trains_as_plain_flax_and_optax_train_it(name, layout):
    assert not deviating(ENTRIES[name], layout, plain())


@pytest.mark.parametrize(
    "name, layout",
    [("both", "context=2,tensor=4"), slow("beside_tensor", "context=4,tensor=2")],
)
def test_a_step_sends_halos_and_transforms_and_gathers_nothing(name, layout):
    entry = ENTRIES[name]
    report = audit(step_of(entry, layout), entry.batch())
    assert not report.surprises
    assert not [row for row in report.rows if row.collective.kind == "all-gather"]
    reasons = {row.reason for row in report.rows}
    assert "asked by fft: a split dim made whole, or back" in reasons
    assert "asked by a convolution: halo of the grid" in reasons


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"height": 30}, "height=30 is not a multiple of patch=4; choose patches that"),
        ({"blocks": 3}, "embed=64 is not a multiple of blocks=3"),
        ({"window": 4}, "window=4: must be odd"),
        ({"modes": 10}, "modes=10: 16 patches along longitude have 9 frequencies"),
        ({"layers": 0}, "layers=0: must be at least 1"),
        ({"threshold": -1.0}, "threshold=-1.0: must be at least 0"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(changes, match):
    with pytest.raises(InputError, match=match):
        configure("tiny-afno", **changes)


@pytest.mark.parametrize(
    "layout, rules, match",
    [
        ("tensor=8", {"height": "tensor", "mlp": None}, "'height' has size 4, which"),
        ("tensor=2", {"height": "tensor"}, "claimed by both 'height' and 'mlp'"),
        (
            "stage=2,tensor=2,microbatches=2",
            {"height": "tensor", "mlp": None},
            "tensor=2 splits space, and stage=2 the layers",
        ),
    ],
)
def test_a_grid_that_cannot_be_split_so_is_refused(layout, rules, match):
    layout = Layout.parse(layout)
    with pytest.raises((InputError, RuleError), match=match):
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
