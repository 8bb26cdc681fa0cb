"""Where the rows of a run go besides its file: trackers, functions, a program's log."""

import logging
import sys
import types

import pytest
from rich.table import Table

from meshpar.errors import InputError
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.run_log import Drawn
from tests.conftest import rows
from tests.run_steps import SMALL, compute_nothing, counted_step
from tests.run_steps import shared_steps as shared_steps

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture
def small(small_text, tmp_path, monkeypatch):
    """A configuration of a run whose steps only count."""
    compute_nothing(monkeypatch, lambda step, state, batch: counted_step(state))
    given = {"layout": "data=2", "text": small_text, "out": tmp_path / "run"}
    return lambda **options: RunConfig(**{**SMALL, "steps": 5, **given, **options})


class Recorded(types.ModuleType):
    """A module whose functions write down how they were called."""

    def __init__(self, name, *functions, fails=()):
        super().__init__(name)
        self.calls, self.fails = [], set(fails)
        for function in functions:
            setattr(self, function, self._recorder(function))

    def _recorder(self, name):
        def record(*args, **options):
            self.calls.append((name, args, options))
            if name in self.fails:
                raise ConnectionError("no server")
            return types.SimpleNamespace(
                info=types.SimpleNamespace(run_id="abc"), log=self.log, finish=self.end
            )

        return record

    def log(self, row, step):
        if "log" in self.fails:
            raise ConnectionError("no server")
        self.calls.append(("log", (row,), {"step": step}))

    def end(self):
        self.calls.append(("finish", (), {}))

    def named(self, name):
        """Arguments of every call of a function."""
        return [(*args, options) for one, args, options in self.calls if one == name]


def test_wandb_gets_every_row_and_a_resumed_run_goes_on_there(small, monkeypatch):
    wandb = Recorded("wandb", "init")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = small(tracker="wandb", stop_after=3)
    pretrain.pretrain(config)
    (begun,) = wandb.named("init")
    assert begun[0]["config"]["steps"] == 5 and begun[0]["resume"] == "allow"
    losses = [row["loss"] for row, _ in wandb.named("log") if "loss" in row]
    assert losses == rows(config.metrics_path, "loss")
    assert all("mfu" not in row for row, _ in wandb.named("log")), "null on a CPU"
    assert wandb.named("finish")
    pretrain.pretrain(small(tracker="wandb", resume=True))
    first, second = (options["id"] for (options,) in wandb.named("init"))
    assert first == second
    assert [at["step"] for row, at in wandb.named("log") if "loss" in row] == [
        *range(5)
    ]


def test_mlflow_gets_every_row_and_a_resumed_run_goes_on_there(small, monkeypatch):
    functions = ("start_run", "log_params", "log_metrics", "end_run")
    mlflow = Recorded("mlflow", *functions)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    pretrain.pretrain(small(tracker="mlflow", stop_after=3))
    pretrain.pretrain(small(tracker="mlflow", resume=True))
    assert mlflow.named("start_run") == [({"run_name": "run"},), ({"run_id": "abc"},)]
    assert len(mlflow.named("log_params")) == 1 and len(mlflow.named("end_run")) == 2
    steps = [at["step"] for row, at in mlflow.named("log_metrics") if "loss" in row]
    assert steps == [*range(5)]


def test_a_tracker_whose_server_is_away_ends_no_run(small, monkeypatch, caplog):
    wandb = Recorded("wandb", "init", fails=["log"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = small(tracker="wandb")
    assert pretrain.pretrain(config, console=False).steps_done == 5
    assert rows(config.metrics_path, "step") == [0, 1, 2, 3, 4, 4]
    told = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert ["no server" in one.getMessage() for one in told] == [True], "once"


def test_a_tracker_that_does_not_begin_or_is_not_there_is_refused(
    small, monkeypatch, refuses
):
    monkeypatch.setitem(sys.modules, "wandb", Recorded("wandb", "init", fails=["init"]))
    with refuses("run.tracker_does_not_begin", "wandb", "no server"):
        pretrain.pretrain(small(tracker="wandb"))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with refuses("run.missing_package", "mlflow", "'meshpar[mlflow]'"):
        pretrain.pretrain(small(tracker=("jsonl", "mlflow")))


def test_callbacks_are_called_with_step_and_metrics_of_every_row(small, monkeypatch):
    named, given = [], []
    module = types.ModuleType("my_callbacks")
    module.note = lambda step, metrics: named.append((step, metrics))
    monkeypatch.setitem(sys.modules, "my_callbacks", module)
    config = small(callback="my_callbacks:note", validate_every=4)
    pretrain.pretrain(
        config, callbacks=[lambda step, metrics: given.append((step, metrics))]
    )
    assert named == given
    assert [step for step, metrics in named if "loss" in metrics] == [*range(5)]
    assert [step for step, it in named if "validation_loss" in it] == [3, 4]


def test_rows_are_written_every_so_many_steps_and_for_the_first_and_the_last(small):
    config = small(steps=9, log_every=4, validate_every=9)
    pretrain.pretrain(config)
    assert rows(config.metrics_path, "step") == [0, 3, 7, 8, 8]


def test_a_folder_does_not_decide_what_is_called(tmp_path):
    (tmp_path / "config.toml").write_text('callback = ["os:abort"]\nsteps = 7\n')
    found = parse_arguments(["--out", str(tmp_path), "--resume"])
    assert (found.callback, found.steps) == ((), 7)
    assert found.optimizer == "adamw,decay_mask=all", "a run of version 0.2"


def test_a_program_may_have_the_lines_instead_of_the_console(small, capsys, caplog):
    caplog.set_level("INFO", logger="meshpar.recipes.pretrain")
    pretrain.pretrain(small(), console=False)
    assert capsys.readouterr().out == ""
    assert any("validation loss 5.25" in line for line in caplog.messages)
    assert any("blocks.mlp.down" in line for line in caplog.messages), "the table"
    assert {one.name for one in caplog.records if "meshpar" in one.name} == {
        "meshpar.recipes.pretrain"
    }
    assert not logging.getLogger("meshpar.recipes").handlers


def test_a_drawn_message_is_plain_text_for_other_handlers():
    table = Table()
    table.add_column("parameter")
    table.add_row("[red]x")
    assert "parameter" in str(Drawn(table)) and "\x1b" not in str(Drawn(table))


def test_a_callback_that_is_no_function_is_refused(small, refuses):
    with pytest.raises(InputError) as caught:
        pretrain.pretrain(small(callback="os:sep"))
    assert caught.value.key == "command.not_a_function"
