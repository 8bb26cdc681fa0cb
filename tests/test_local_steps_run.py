"""A run with local steps: its options, its metrics, and where it goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.cli.main import main
from meshpar.models.convert.export import export
from meshpar.models.presets import build
from meshpar.planner.workload.problems import layout_problems
from meshpar.planner.workload.shapes import SHAPES
from meshpar.recipes import pretrain as run_module
from meshpar.recipes.config import RunConfig
from meshpar.recipes.optimizers import learning_rate_schedule, make_outer_optimizer
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.pretrain import pretrain
from meshpar.recipes.resume import refuse_other_replicas
from meshpar.recipes.step import check_intervals, make_step
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import read_arrays
from meshpar.train.metrics import combined_metrics
from tests.conftest import rows
from tests.marks import slow
from tests.multiprocess.test_train import train
from tests.run_steps import compute_nothing, counted_step, shared_step
from tests.run_steps import shared_steps as shared_steps
from tests.states import drawn

pytestmark = pytest.mark.usefixtures("shared_steps")

MODEL = dict(preset="test", model="vocab=256", seq=16, global_batch=8)
STEPS = 4


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, small_text, shared_steps):
    """The folder of a run of two intervals, and its validation loss."""
    out = tmp_path_factory.mktemp("local")
    config = RunConfig(
        **MODEL,
        layout="data=2",
        sync_every=2,
        steps=STEPS,
        text=small_text,
        out=out,
        sample_tokens=0,
    )
    return out, pretrain(config).validation_loss


@pytest.mark.parametrize("layout", [slow("data=2"), slow("data=2,fsdp=2")])
def test_a_run_stopped_within_an_interval_goes_on_on_any_layout(
    layout, uninterrupted, small_text, tmp_path
):
    whole, validation_loss = uninterrupted
    options = {**MODEL, "steps": STEPS, "text": small_text, "out": tmp_path}
    options.update(sample_tokens=0, sync_every=2)
    pretrain(RunConfig(**options, layout="data=2", stop_after=3))
    rest = pretrain(RunConfig(**options, layout=layout, resume=True))
    found = rows(tmp_path / "metrics.jsonl", "loss")
    wanted = rows(whole / "metrics.jsonl", "loss")
    assert len(found) == STEPS
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert rest.validation_loss == pytest.approx(validation_loss, rel=1e-5)


def test_the_learning_rate_lags_by_the_steps_that_a_replica_skips_on_average(
    small_text, tmp_path, monkeypatch
):
    options = {**MODEL, "steps": 20, "text": small_text, "out": tmp_path}
    options.update(sample_tokens=0, sync_every=2, layout="data=2")
    compute_nothing(monkeypatch, lambda step, state, batch: counted_step(state))
    pretrain(RunConfig(**options, stop_after=2))
    monkeypatch.setattr(run_module, "skipped_in", lambda run, state: 1.0)
    config = RunConfig(**options, stop_after=3, resume=True)
    pretrain(config)
    rate = rows(tmp_path / "metrics.jsonl", "learning_rate")[2]
    assert rate == pytest.approx(float(learning_rate_schedule(config)(2 - 1 / 2)))


@pytest.mark.parametrize("layout", ["data=2", slow("data=2,precision=bf16")])
def test_a_checkpoint_within_an_interval_is_read_where_replicas_agreed(
    layout, small_text, tmp_path
):
    options = {**MODEL, "steps": STEPS, "text": small_text, "out": tmp_path}
    options.update(sample_tokens=0, sync_every=2, layout=layout)
    config = RunConfig(**options, stop_after=3)
    pretrain(config)
    step = shared_step(config)
    with Checkpoints(
        tmp_path / "checkpoints", layer_orders=step.layer_orders
    ) as checkpoints:
        state = checkpoints.restore(step.state_shapes, step.shardings)
    wanted = step.in_layer_order(step.parameters(state))
    _, tree = read_arrays(tmp_path)
    shapes = jax.tree.map(lambda one: one.shape, wanted)
    assert jax.tree.map(lambda one: one.shape, tree["params"]) == shapes
    found = jax.tree.map(lambda one: one[...], tree["params"])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    drifted = jax.tree.map(lambda one: np.asarray(one)[0], state.params)
    assert (drifted["token_embed"] != found["token_embed"]).any()
    told = export(tmp_path, tmp_path / "theirs")
    assert told["step"] == 3


def test_states_of_replicas_are_read_as_their_mean(tmp_path):
    model = build("tiny-moe", layers=1, dense_layers=0)
    devices = jax.devices()[:2]
    layout = "data=2,sync_every=4,precision=bf16,param_dtype=bf16"
    step = make_train_step(model, optax.sgd(0.1), layout, devices=devices)
    state = drawn(step, scale=5.0, steps_done=2)  # Within an interval.
    with Checkpoints(tmp_path, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, {"layout": str(step.layout)})
    _, tree = read_arrays(tmp_path)
    for name in ("bias", "tokens"):
        replica_specs = np.asarray(state.model_state["blocks"]["mlp"]["router"][name])
        found = tree["model_state"]["blocks"]["mlp"]["router"][name]
        assert found.shape == replica_specs.shape[1:]
        np.testing.assert_allclose(found[...], replica_specs.mean(0))
    wanted = step.in_layer_order(step.parameters(state))["token_embed"]
    embed = tree["params"]["token_embed"][...].astype(wanted.dtype)
    np.testing.assert_array_equal(embed, wanted)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(uninterrupted, small_text, tmp_path):
    whole, validation_loss = uninterrupted
    options = ["--layout", "data=2,fsdp=2", "--sync-every", "2"]
    options += ["--model", "vocab=256", "--steps", str(STEPS), "--text"]
    train(2, 2, *options, str(small_text), "--out", str(tmp_path))
    log = tmp_path / "metrics.jsonl"
    wanted = rows(whole / "metrics.jsonl", "loss")
    np.testing.assert_allclose(rows(log, "loss"), wanted, rtol=1e-5)
    (found,) = rows(log, "validation_loss")
    assert found == pytest.approx(validation_loss, rel=1e-5)


def test_the_rows_of_processes_count_each_replica_once():
    # Replicas 0 and 1 on two processes each.
    losses = [{"loss": loss, "weight_sum": 8.0} for loss in (1.0, 1.0, 3.0, 3.0)]
    assert combined_metrics(losses, [1, 1, 1, 1], 2) == {
        "loss": 2.0,
        "weight_sum": 16.0,
    }


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--sync-every", "0"], ("value.not_whole_number", "sync_every", 0, 1)),
        (
            ["--outer-learning-rate", "0"],
            ("value.not_positive", "outer_learning_rate", "0.0"),
        ),
        (["--outer-momentum", "1"], ("value.out_of_range", "outer_momentum", "1.0", 0)),
    ],
)
def test_a_value_that_cannot_be_is_refused(words, refusal, refuses):
    with refuses(*refusal):
        parse_arguments(words)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            dict(sync_every=4, steps=10),
            ("run.steps_not_multiple", "--steps 10", "sync_every=4", 2, "--steps 8"),
        ),
        (
            dict(outer_momentum=0.5, steps=10),
            ("run.option_without_local_steps", "--outer-momentum", "sync_every=1"),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, refusal, refuses):
    config = RunConfig(layout="data=2", **options)
    with refuses(*refusal):
        check_intervals(config, Layout(data=2, sync_every=config.sync_every or 1))


@pytest.mark.parametrize("name", ["nesterov", "sgd", "adam"])
def test_every_outer_optimizer_moves_against_its_gradient(name):
    config = RunConfig(outer_optimizer=name, outer_learning_rate=0.5)
    optimizer = make_outer_optimizer(config)
    updates, _ = optimizer.update(jnp.float32(2), optimizer.init(jnp.float32(1)))
    # 0.5 x 2; Nesterov adds 0.9 of it ahead; Adam's first step is its rate.
    assert float(updates) == pytest.approx(
        {"nesterov": -1.9, "sgd": -1.0}.get(name, -0.5), rel=1e-4
    )


def test_the_options_make_the_step():
    config = RunConfig(
        **MODEL,
        layout="data=2,tensor=2",
        sync_every=5,
        steps=5,
        mesh_order="tensor,data",
    )
    step = make_step(config)
    assert str(step.layout) == "data=2,tensor=2,sync_every=5" and step.is_local
    ids = [device.id for device in step.mesh.devices.flat]
    assert ids == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("before", "now", "had", "has"),
    [
        ("data=2,sync_every=4", "data=2,fsdp=2,sync_every=8", 2, 2),
        ("data=4", "data=2,tensor=2", 1, 1),
        ("data=2,sync_every=4", "data=4,sync_every=4", 2, 4),
        ("data=2,sync_every=4", "data=2", 2, 1),
        ("data=2", "data=2,sync_every=4", 1, 2),
    ],
)
def test_a_checkpoint_is_of_as_many_replicas(before, now, had, has, refuses):
    pair = {"layout": before}, {"layout": now}
    if had == has:
        refuse_other_replicas(*pair)
        return
    with refuses("run.changed_replicas", f"{had} replicas", f"has {has}"):
        refuse_other_replicas(*pair)


def test_a_plan_of_local_steps_has_replicas_in_every_layout(capsys):
    words = ["plan", "--model", "llama3-8b", "--hardware", "h100-80gb", "--devices"]
    words += ["16", "--global-batch", "32", "--seq", "4096", "--plans", "3"]
    words += ["--all"]
    assert main([*words, "--sync-every", "8"]) == 0
    text = capsys.readouterr().out
    plans = text.partition("plans, fastest first:\n")[2].splitlines()[:3]
    for line in plans:
        layout = Layout.parse(line.split()[-1])
        assert layout.sync_every == 8 and layout.data > 1
        assert "data" not in layout.split_axes or layout.zero == 0


def test_one_replica_is_a_problem_to_the_planner():
    size = {"global_batch": 32, "seq": 4096}
    layout = Layout(fsdp=16, sync_every=8)
    (problem,) = layout_problems(SHAPES["llama3-8b"], layout, **size)
    assert problem.option == "sync_every" and "data=1" in problem.message
