"""`meshpar inspect` lists what is in a checkpoint, and whether it is damaged."""

import json

import pytest

from meshpar.cli.main import main
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.step import TrainStep
from tests.refusals import names
from tests.run_steps import compute_nothing, counted_step
from tests.states import drawn
from tests.test_checkpoint import small_state


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small_text):
    """The folder of a run that has saved after steps 1 and 2."""
    out = tmp_path_factory.mktemp("run")
    options = dict(preset="test", model="vocab=256", seq=16, global_batch=8)
    config = RunConfig(
        **options, layout="fsdp=2", steps=2, text=small_text, out=out, save_every=1
    )
    with pytest.MonkeyPatch.context() as patch:
        compute_nothing(patch, lambda step, state, batch: counted_step(state))
        patch.setattr(TrainStep, "init", lambda step, seed=0: drawn(step, scale=0.3))
        pretrain.pretrain(config)
    return out


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The same of small arrays that no run has made."""
    out = tmp_path_factory.mktemp("kept")
    with Checkpoints(out / "checkpoints") as checkpoints:
        for steps_done in (1, 2):
            checkpoints.save(small_state(steps_done), {"layout": "data=1"})
    return out


def inspected(capsys, *words):
    assert main(["inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_its_layout_step_options_data_and_arrays_are_listed(saved, capsys):
    found = inspected(capsys, saved)
    assert (found["layout"], found["step"], found["steps"]) == ("fsdp=2", 2, [1, 2])
    assert (found["config"]["preset"], found["config"]["seed"]) == ("test", 0)
    assert found["data"]["windows"] == 16 and "crc32" in found["data"]["data"]
    arrays = {one["path"]: one for one in found["arrays"]}
    assert arrays["params.token_embed"] == {
        "path": "params.token_embed",
        "shape": [256, 32],
        "dtype": "float32",
    }
    assert {"step", "seed", "skipped"} <= arrays.keys()
    assert found["damage"] is None


def test_any_folder_on_the_way_and_any_step_will_do(saved, capsys):
    newest = inspected(capsys, saved / "checkpoints")
    assert newest == inspected(capsys, saved / "checkpoints" / "2")
    assert inspected(capsys, saved, "--step", 1)["step"] == 1
    assert main(["inspect", str(saved)]) == 0
    output = capsys.readouterr().out
    assert "layout fsdp=2" in output and "params.blocks.mlp.down" in output


def test_a_checkpoint_before_the_first_step_can_be_asked_for(tmp_path, capsys):
    with Checkpoints(tmp_path) as checkpoints:
        for steps_done in (0, 1):
            checkpoints.save(small_state(steps_done), {"layout": "data=1"})
    assert inspected(capsys, tmp_path, "--step", 0)["step"] == 0
    assert inspected(capsys, tmp_path / "0")["step"] == 0
    assert inspected(capsys, tmp_path)["step"] == 1


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["no/such/folder"], ("checkpoint.missing_folder", "'no/such/folder'")),
        (
            ["{}", "--step", "7"],
            ("checkpoint.no_such_step", "step 7", "'{}/checkpoints'", "1, 2"),
        ),
        (
            ["{}/checkpoints/1/state"],
            ("checkpoint.none_in_folder", "'{}/checkpoints/1/state'"),
        ),
    ],
)
def test_what_is_no_checkpoint_is_told_in_one_line(
    words, refusal, kept, refuses_command
):
    words, refusal = ([one.format(kept) for one in said] for said in (words, refusal))
    refuses_command(["inspect", *words], *refusal)


def test_damage_is_told_and_is_status_1(saved, capsys):
    files = (saved / "checkpoints" / "1" / "state").rglob("*")
    largest = max(
        (one for one in files if one.is_file()), key=lambda f: f.stat().st_size
    )
    size = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[:-1])
    assert main(["inspect", str(saved), "--step", "1", "--json"]) == 1
    captured = capsys.readouterr()
    damage = json.loads(captured.out)["damage"]
    told = f"{size:,}", f"{size - 1:,}"
    assert all(names(damage, one) for one in told), damage
    assert captured.err.startswith("step 1 ") and largest.name in captured.err
