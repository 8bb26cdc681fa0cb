"""A run goes on under any other layout: the same data, and the same losses."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from meshpar import Layout
from meshpar.recipes import elastic, pretrain
from meshpar.recipes.config import RunConfig
from tests.conftest import rows
from tests.run_steps import compute_nothing, counted_step
from tests.run_steps import shared_steps as shared_steps

BASE = "data=2,stage=2,tensor=2,microbatches=2"
SAVED, STEPS = 3, 8
DENSE = dict(preset="test", model="vocab=256,layers=4", seq=16, global_batch=8)
EXPERTS = dict(
    preset="tiny-moe",
    model="layers=4,embed=32,heads=4,kv_heads=2,vocab=256,experts=8,expert_ffn=16",
    seq=16,
    global_batch=8,
)
IN_BF16 = ",precision=bf16,param_dtype=bf16"


@pytest.fixture(scope="module", autouse=True)
def steps_only(shared_steps):
    """Neither looks at the validation text nor samples, which are programs too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "validate", lambda *args: 5.25)
        patch.setattr(pretrain, "sample", lambda *args: np.array([65]))
        yield


def run_of(model, text, out, layout, **options):
    return RunConfig(
        **model,
        layout=layout,
        steps=STEPS,
        save_every=SAVED,
        keep=9,
        text=text,
        out=out,
        bubble_rounds=0,
        **options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_text):
    """(model, more of the layout) -> folder and losses of a run nobody interrupted."""
    made = {}

    def of(name, model, more=""):
        if name not in made:
            out = tmp_path_factory.mktemp(name)
            pretrain.pretrain(run_of(model, small_text, out, BASE + more))
            made[name] = out, rows(out / "metrics.jsonl", "loss")
        return made[name]

    return of


def losses_of(model, whole_run, text, tmp_path, layout):
    """Of a run that goes on from the checkpoint of step `SAVED` alone."""
    out = tmp_path / "resumed"
    saved = out / "checkpoints" / str(SAVED)
    shutil.copytree(whole_run / "checkpoints" / str(SAVED), saved)
    pretrain.pretrain(run_of(model, text, out, layout, resume=True))
    assert rows(out / "metrics.jsonl", "step")[:-1] == list(range(SAVED, STEPS))
    return rows(out / "metrics.jsonl", "loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=4,tensor=2",
        "data=1",
        "data=8,zero=1",
        "data=2,fsdp=2,zero=2,tensor=2",
        "data=4,tensor=2,sequence_parallel=true",
        "fsdp=2,tensor=2,context=2",
        "stage=3,tensor=2,microbatches=4",
        "stage=4,fsdp=2,microbatches=4,schedule=gpipe",
        "data=2,stage=2,chunks=2,microbatches=4,schedule=interleaved_1f1b",
        "stage=2,microbatches=8,splits=1/3,tensor=2",
        "data=2,fsdp=2,optimizer_memory=host",
    ],
)
def test_the_next_five_losses_are_those_of_the_run_that_went_on(
    layout, whole, small_text, tmp_path
):
    out, losses = whole("dense", DENSE)
    found = losses_of(DENSE, out, small_text, tmp_path, layout)
    np.testing.assert_allclose(found, losses[SAVED:], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["expert=8", "fsdp=2,stage=2,expert=2,microbatches=2", "data=4,tensor=2"]
)
def test_so_they_are_under_other_degrees_of_expert(layout, whole, small_text, tmp_path):
    out, losses = whole("experts", EXPERTS)
    found = losses_of(EXPERTS, out, small_text, tmp_path, layout)
    np.testing.assert_allclose(found, losses[SAVED:], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "layout", "rtol"),
    [
        ("", "fsdp=4,tensor=2" + IN_BF16, 1e-2),
        (IN_BF16, "fsdp=4,tensor=2", 1e-2),
        (IN_BF16, "fsdp=8,precision=bf16", 1e-2),
    ],
)
def test_so_they_are_with_parameters_stored_otherwise(
    more, layout, rtol, whole, small_text, tmp_path
):
    """bf16 with its master: what is compared differs by the rounding of activations."""
    out, losses = whole("stored" + more, DENSE, more)
    found = losses_of(DENSE, out, small_text, tmp_path, layout)
    np.testing.assert_allclose(found, losses[SAVED:], rtol=rtol)


@pytest.mark.parametrize(
    ("line", "before", "wanted"),
    [
        ("data=-1", "data=8", "data=4,microbatches=2"),
        ("data=-1", "data=2,microbatches=2", "data=4"),
        (
            "data=-1,stage=2,microbatches=2",
            "data=4,stage=2,microbatches=2",
            "data=2,stage=2,microbatches=4",
        ),
    ],
)
def test_microbatches_follow_the_devices_and_the_batch_stays(line, before, wanted):
    layout = Layout.parse(line).resolve(4)
    assert str(elastic.recut(layout, Layout.parse(before), global_batch=16)) == wanted


def test_a_batch_that_the_devices_cannot_share_is_told_with_both_numbers(refuses):
    with refuses("batch.indivisible", 16, 3, "data=3"):
        elastic.recut(Layout(data=3), Layout(data=8), global_batch=16)
    with refuses("layout.wrong_device_count", 4, 6):
        elastic.shared(Layout.parse("data=2,stage=2,tensor=2,microbatches=2"), 6)


@pytest.mark.parametrize("asked", ["data=8", "data=-1"])
def test_a_second_restart_on_fewer_devices_is_cut_as_the_first(asked, monkeypatch):
    config = RunConfig(layout=asked, resume=True, out=Path("run"), global_batch=16)
    before = {"layout": "data=8", "layout_asked": asked}
    monkeypatch.setattr(elastic, "newest_description", lambda folder: before)
    first, told = elastic.fitted(config, 4, 1)
    assert first == "data=4,microbatches=2" and "4 devices instead of 8" in told
    before["layout"] = first
    assert elastic.fitted(config, 4, 1) == (first, "")
    whole = elastic.fitted(config, 8, 2)[0]
    assert whole == "data=8"
    other = replace(config, layout=f"{asked},microbatches=4")
    assert "microbatches=2" not in elastic.fitted(other, 4, 1)[0]
    named = replace(config, layout="fsdp=4")
    assert elastic.fitted(named, 4, 1) == ("fsdp=4", "")


HALF = (
    f"4 devices instead of 8: layout {BASE} -> stage=2,tensor=2,microbatches=4; "
    "the global batch stays 8 sequences in the same order, 2 on a device at once"
)


def with_half_the_devices(monkeypatch):
    """What the earlier run's layout needs is not there."""
    half = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *args: half)
    monkeypatch.setattr(jax, "device_count", lambda: len(half))


@pytest.mark.slow
def test_a_run_goes_on_with_half_the_devices_and_the_same_losses(
    whole, small_text, tmp_path, monkeypatch, capsys
):
    out, losses = whole("dense", DENSE)
    with_half_the_devices(monkeypatch)
    found = losses_of(DENSE, out, small_text, tmp_path, BASE)
    np.testing.assert_allclose(found, losses[SAVED:], rtol=1e-5)
    assert HALF in capsys.readouterr().out


def test_the_same_command_goes_on_with_half_the_devices_and_says_how(
    small_text, tmp_path, monkeypatch, capsys
):
    batches = []

    def timed_step(step, state, batch):
        batches.append(batch["tokens"])
        return counted_step(state)

    compute_nothing(monkeypatch, timed_step)
    pretrain.pretrain(run_of(DENSE, small_text, tmp_path / "whole", BASE))
    expected = batches[SAVED:]
    batches.clear()
    with_half_the_devices(monkeypatch)
    losses_of(DENSE, tmp_path / "whole", small_text, tmp_path, BASE)
    np.testing.assert_array_equal(batches, expected)
    assert HALF in capsys.readouterr().out
