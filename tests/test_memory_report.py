"""Each part of a step's memory: the formula beside what the compiler says."""

import functools
import math

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, batch_shapes, make_train_step, memory_report
from meshpar.models.presets import build
from meshpar.recipes.bench.memory import memory_table
from meshpar.schedules import make_schedule
from tests.marks import slow

SIZES = dict(layers=2, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=64, gated=True)
MODEL = build(**SIZES)
TABLE = 64 * 64
"""Values of the embedding, and of the head."""


@functools.cache
def report_of(line, model=MODEL, **options):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(model, optax.adam(1e-3), layout, devices=devices, **options)
    return memory_report(step, batch_shapes(8, 32))


def at_once_of(report):
    """The most that there is of a report's temporaries, of its own parts."""
    size = {part.name: part.formula_bytes for part in report.parts}
    logits, workspace = size["logits"], size["workspace"]
    if "stage" not in report.layout:
        # At the loss no block's gradient exists, and behind it no end is gathered.
        logits -= size["gradients"]
        layout = Layout.parse(report.layout)
        value = 2 if layout.precision == "bf16" else 4
        ends = value * (2 * TABLE // layout.tensor + 64)
        workspace -= min(size["gathered weights"], ends)
        # Nor does the embedding's gradient before the last block's.
        shards = math.prod(getattr(layout, axis) for axis in layout.split_axes)
        workspace -= 4 * TABLE // layout.tensor // shards
    beside = max(logits, workspace) + size["gathered weights"] + size["activations"]
    later = size["gradients of the ends"], size.get("fetched states", 0)
    return size["gradients"] + max(beside, *later)


def part_of(report, name):
    return next(part.formula_bytes for part in report.parts if part.name == name)


SPLIT = "fsdp=2,tensor=2,precision=bf16,param_dtype=bf16"
LAYOUTS = [
    slow("data=2,zero=1,remat=full"),
    SPLIT,
    slow("stage=2,microbatches=4,remat=full"),
    slow("data=2,remat=full,optimizer_memory=host"),
    slow("data=2,tensor=2,remat=full,sync_every=4"),
]


@pytest.mark.parametrize("line", LAYOUTS)
def test_states_are_those_of_the_compiled_program_and_parts_add_up(line):
    report = report_of(line)
    states = [part for part in report.parts if part.compiled_bytes is not None]
    for part in states:
        assert part.formula_bytes == pytest.approx(part.compiled_bytes, rel=0.001)
    assert ("master copy" in {part.name for part in states}) == ("bf16" in line)
    resting = sum(part.formula_bytes for part in states if part.memory == "device")
    at_once = report.formula_bytes - resting
    assert at_once == pytest.approx(at_once_of(report), abs=10)
    # XLA:CPU fuses little: what it keeps besides is no more than all of it again.
    assert abs(report.difference) < 0.6
    compiled = sum(part.compiled_bytes for part in states) + report.temp_bytes
    assert report.peak_bytes == pytest.approx(compiled, rel=0.2)


@pytest.mark.slow
def test_a_schedule_of_ones_own_holds_what_it_says():
    line = "stage=2,microbatches=4"
    orders = make_schedule("gpipe", 2, 4)
    own = part_of(report_of(line, schedule=orders), "activations")
    assert own == part_of(report_of(f"{line},schedule=gpipe"), "activations")
    assert own > part_of(report_of(line), "activations")


@pytest.mark.slow
def test_logits_are_as_many_as_the_models_head_makes_at_a_time():
    # 8 x 32 tokens of 64 fp32 logits, and a quarter of them.
    whole, chunk = (
        part_of(report_of("data=1", build(**SIZES, logits_bytes=size)), "logits")
        for size in (0, 2**14)
    )
    assert whole - chunk == 2 * (8 * 32 * 64 * 4 - 2**14)


@pytest.mark.slow
def test_experts_of_split_sequences_have_a_report():
    small = dict(layers=1, embed=16, heads=2, vocab=32, experts=2, expert_ffn=8)
    model = build("tiny-moe-capacity", kv_heads=2, **small)
    report = report_of("context=2,expert=2", model)
    assert sum(part.formula_bytes for part in report.parts) > 0


def test_a_report_prints_every_part_and_is_plain_data():
    report = report_of(SPLIT)
    text = str(report)
    for part in report.parts:
        assert part.name in text and part.how in text
    assert f"{report.difference:+.1%}" in text
    found = report.to_json()
    assert found["parts"][0]["name"] == "parameters"
    assert found["formula_bytes"] == report.formula_bytes
    table = memory_table([report])
    assert table.row_count == 1
    cells = [next(column.cells) for column in table.columns]
    assert cells[-2] == f"{report.peak_bytes / 1e9:.2f}"
    assert np.isfinite(report.difference)
