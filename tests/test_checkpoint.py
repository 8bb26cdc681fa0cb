"""A checkpoint holds the same values under any layout, or says what is wrong."""

import functools
import gc
import logging
import os
import re
import subprocess
import threading
import weakref
from concurrent import futures
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, TrainState, make_train_step
from meshpar.cli.main import main
from meshpar.models.presets import build
from meshpar.rules.rules import spec_axes
from meshpar.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpointWarning,
    UncheckedCheckpointWarning,
)
from meshpar.train.checkpoint import checkpoints as module
from meshpar.train.checkpoint.choice import error_reason
from meshpar.train.checkpoint.contents import read_arrays, read_contents
from meshpar.train.layer_order import model_order_structs
from tests import warm
from tests.marks import slow
from tests.refusals import names, neutral
from tests.states import drawn

RUN = {"layout": "fsdp=4,tensor=2", "seed": 3, "text": "plays/hamlet.txt"}


@functools.cache
def make_step(layout, **sizes):
    return make_train_step(
        build("test", **sizes), optax.adam(1e-3), layout, devices=jax.devices()
    )


def numbered_state(step, steps_done):
    """A state whose every array holds the numbers from 0 on, sharded as `step` says."""

    def numbered(shape, sharding):
        values = np.arange(shape.size).reshape(shape.shape).astype(shape.dtype)
        return jax.device_put(values, sharding)

    state = jax.tree.map(numbered, step.state_shapes, step.shardings)
    return TrainState(
        step=jnp.int32(steps_done),
        seed=state.seed,
        skipped=state.skipped,
        params=state.params,
        opt_state=state.opt_state,
    )


def small_state(steps_done):
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    return TrainState(
        step=jnp.int32(steps_done),
        seed=jnp.uint32(0),
        skipped=jnp.int32(0),
        params={"w": jnp.asarray(values)},
        opt_state={},
    )


def restore_like(checkpoints, state):
    """The newest state, with the shapes and shardings of `state`."""
    shapes = jax.eval_shape(lambda: state)
    return checkpoints.restore(shapes, jax.tree.map(lambda x: x.sharding, state))


def assert_bitwise_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def run_in_child(program, folder):
    return subprocess.run(
        [*warm.words(), "-c", program, str(folder)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the state of a checkpoint written under fsdp=4,tensor=2."""
    folder = tmp_path_factory.mktemp("saved")
    state = numbered_state(make_step("fsdp=4,tensor=2"), 7)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state, RUN)
    return folder, state


@pytest.mark.parametrize("layout", ["fsdp=4,tensor=2", "data=8", "data=2,fsdp=4"])
def test_a_state_is_bitwise_the_same_under_any_layout(layout, saved):
    folder, state = saved
    step = make_step(layout)
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(step.state_shapes, step.shardings)
    assert_bitwise_equal(restored, state)
    for array, sharding in zip(
        jax.tree.leaves(restored), jax.tree.leaves(step.shardings), strict=True
    ):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


PIPELINED = {
    "data=2,stage=2,tensor=2,microbatches=2": "even stages",
    "stage=3,tensor=2,microbatches=2": "4 layers on 3 stages, one place empty",
    "data=2,stage=2,chunks=2,microbatches=2,schedule=interleaved_1f1b": "permuted",
    "stage=2,microbatches=4,splits=1/3": "two places empty",
    "fsdp=2,stage=3,microbatches=2,optimizer_memory=host": "a place empty, on the host",
    "stage=2,chunks=2,microbatches=2,schedule=interleaved_1f1b,optimizer_memory=host": (
        "permuted, on the host"
    ),
}


OTHERS = {
    "data=1": "one device",
    "fsdp=8": "all parameters split",
    "data=4,zero=1": "optimizer state split",
    "data=2,fsdp=2,zero=2,tensor=2": "and gradients",
    "data=4,tensor=2,sequence_parallel=true": "the residual stream split too",
    "data=2,fsdp=2,optimizer_memory=host": "optimizer state on the host",
    "stage=4,microbatches=4": "a layer a stage",
    "stage=2,chunks=2,microbatches=4,schedule=looped_bfs": "another order of chunks",
    "fsdp=2,stage=2,chunks=2,microbatches=4,schedule=interleaved_1f1b": "two chunks",
    "stage=3,microbatches=2,splits=2/1/1": "three devices",
    "data=8,remat=full": "recomputed",
    "tensor=2": "two devices",
}
"""Layouts that a checkpoint of `data=8` goes on under, and what is other there."""


@functools.cache
def four_layer_step(layout):
    layout = Layout.parse(layout)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(
        build("test", layers=4), optax.adam(1e-2), layout, devices=devices
    )


def tokens_of(seed, batch=8, seq=12):
    text = np.random.default_rng(seed).integers(0, 64, (batch, seq + 1), np.int32)
    weights = np.ones((batch, seq), np.float32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": weights}


def trained(step, state, seeds):
    """The state after a step on each batch, and the losses."""
    losses = []
    for seed in seeds:
        state, metrics = step(state, tokens_of(seed))
        losses.append(float(metrics["loss"]))
    return state, losses


def restored_under(folder, layout):
    step = four_layer_step(layout)
    with Checkpoints(folder, layer_orders=step.layer_orders) as checkpoints:
        return step, checkpoints.restore(step.state_shapes, step.shardings)


@pytest.fixture(scope="module")
def trained_on_one_axis(tmp_path_factory):
    """A checkpoint after two steps under data=8, its state, and the next two losses."""
    folder = tmp_path_factory.mktemp("trained")
    step = four_layer_step("data=8")
    state, _ = trained(step, step.init(seed=0), (0, 1))
    with Checkpoints(folder, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(state, RUN)
    kept = jax.tree.map(np.array, state)
    return folder, kept, trained(step, state, (2, 3))[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*PIPELINED, *OTHERS])
def test_a_run_goes_on_under_stages_and_back_with_the_same_losses(
    layout, trained_on_one_axis, tmp_path
):
    folder, state, losses = trained_on_one_axis
    step, staged = there_and_back(folder, state, layout, tmp_path)
    np.testing.assert_allclose(trained(step, staged, (2, 3))[1], losses, rtol=1e-5)


def there_and_back(folder, state, layout, other_folder):
    """The step and the state under a layout, from which the first comes back."""
    step, staged = restored_under(folder, layout)
    with Checkpoints(other_folder, layer_orders=step.layer_orders) as checkpoints:
        checkpoints.save(staged, RUN)
    _, back = restored_under(other_folder, "data=8")
    assert_bitwise_equal(back, state)
    for array, sharding in zip(
        jax.tree.leaves(staged), jax.tree.leaves(step.shardings), strict=True
    ):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert sharding.memory_kind in (None, array.sharding.memory_kind)
    return step, staged


@pytest.mark.parametrize("layout", [list(PIPELINED)[1], list(PIPELINED)[-1]])
def test_every_layer_comes_to_its_place_and_nothing_to_an_empty_one(layout, tmp_path):
    first = four_layer_step("data=8")
    state = drawn(first, scale=1.0, steps_done=2)
    with Checkpoints(tmp_path / "first") as checkpoints:
        checkpoints.save(state, RUN)
    step, staged = there_and_back(tmp_path / "first", state, layout, tmp_path / "other")

    def check(found, whole, order):
        if order.places is not None:
            whole = np.asarray(whole)
            layers = [whole[at] if at >= 0 else 0 * whole[0] for at in order.places]
            whole = np.stack(layers)
        np.testing.assert_array_equal(found, whole)

    jax.tree.map(check, staged, state, step.layer_orders)
    assert any(one.places for one in jax.tree.leaves(step.layer_orders))


@pytest.mark.parametrize("layout", list(PIPELINED)[1:3])
def test_layers_out_of_order_stay_split_over_the_stages_while_stored(layout):
    step = four_layer_step(layout)
    stored = model_order_structs(step.state_shapes, step.shardings, step.layer_orders)
    wholes = jax.tree.leaves(stored.params["blocks"])
    for whole, here in zip(
        wholes, jax.tree.leaves(step.state_shapes.params["blocks"]), strict=True
    ):
        assert whole.shape == (4, *here.shape[1:])
        split = "stage" in spec_axes(whole.sharding.spec)
        assert split or all(size % step.layout.stage for size in whole.shape)


def test_what_describes_the_run_comes_back(saved):
    folder, _ = saved
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest_step == 7
        assert checkpoints.run_of_latest() == RUN


@pytest.mark.parametrize("sizes", [{"embed": 64}, {"layers": 4}])
def test_another_models_shapes_are_both_named_with_a_way_out(sizes, saved, refuses):
    folder, state = saved
    step = make_step("data=-1", **sizes)
    path, there, here = next(
        (jax.tree_util.keystr(path, simple=True, separator="."), old.shape, new.shape)
        for (path, old), new in zip(
            jax.tree.leaves_with_path(state),
            jax.tree.leaves(step.state_shapes),
            strict=True,
        )
        if old.shape != new.shape
    )
    other = "checkpoint.other_model", 7, path, there, here
    with Checkpoints(folder) as checkpoints, refuses(*other, kind=CheckpointError):
        checkpoints.restore(step.state_shapes, step.shardings)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("\n\n  missing keys  \nmore", "missing keys"),
        ("The trees differ:\n\n  at a.b", "at a.b"),
        ("The trees differ:\n", "The trees differ:"),
        ("", "ValueError"),
    ],
)
def test_the_reason_of_an_error_is_its_first_line_that_tells_one(
    text, reason, tmp_path, monkeypatch, refuses
):
    def fail(*_, **__):
        raise ValueError(text)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(5), RUN)
        monkeypatch.setattr(module, "read_run", fail)
        told = "checkpoint.unreadable", 5, f"{reason};"
        with refuses(*told, kind=CheckpointError):
            checkpoints.run_of_latest()


RESTORE_WITH_BIASES = """
import sys
from meshpar.train.checkpoint import CheckpointError, Checkpoints
from tests.test_checkpoint import make_step

with Checkpoints(sys.argv[1]) as checkpoints:
    step = make_step("data=-1", qkv_bias=True)
    try:
        checkpoints.restore(step.state_shapes, step.shardings)
    except CheckpointError as error:
        print("refused:", error.key, error)
"""


def test_a_checkpoint_without_a_parameter_of_the_model_is_refused(saved):
    """In a child: Orbax leaves reads unfinished, which Python reports at any time."""
    folder, _ = saved
    child = run_in_child(RESTORE_WITH_BIASES, folder)
    refused = r"refused: checkpoint\.unreadable \D* 7 .*[^:]$"
    assert re.search(refused, child.stdout, re.MULTILINE), child.stderr


def test_a_folder_without_checkpoints_is_refused_with_a_way_out(tmp_path, refuses):
    none = "checkpoint.none_in_folder", tmp_path / "empty"
    with Checkpoints(tmp_path / "empty") as checkpoints:
        assert checkpoints.latest_step is None
        with refuses(*none, kind=CheckpointError):
            checkpoints.run_of_latest()
        with refuses(*none, kind=CheckpointError):
            restore_like(checkpoints, small_state(0))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, refuses):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with refuses("checkpoint.folder_not_made", folder, kind=CheckpointError):
            Checkpoints(folder)


@pytest.mark.parametrize(
    "item, read",
    [
        ("run", Checkpoints.run_of_latest),
        ("state", lambda checkpoints: restore_like(checkpoints, small_state(0))),
    ],
)
def test_a_damaged_checkpoint_is_refused(item, read, tmp_path, refuses):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(5), RUN)
    for file in (tmp_path / "5" / item).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    damaged = "checkpoint.damaged", 5, tmp_path
    with (
        Checkpoints(tmp_path) as checkpoints,
        refuses(*damaged, kind=CheckpointError, words=False),  # Of Orbax's files.
    ):
        read(checkpoints)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for steps_done in (1, 2, 3):
            checkpoints.save(small_state(steps_done), {"saved": steps_done})
        assert checkpoints.run_of_latest() == {"saved": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_those_of_every_nth_step_are_kept_too(tmp_path):
    with Checkpoints(tmp_path, keep=1, keep_every=2) as checkpoints:
        for steps_done in (1, 2, 3, 4, 5):
            checkpoints.save(small_state(steps_done), RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


@functools.cache
def counting_step():
    """A state laid out as a step's, and a program that adds 1 to every value in place.

    So does a step of training take its state's memory, whose program is far longer.
    """
    step = four_layer_step("data=8")
    add_one = jax.jit(
        lambda state: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state),
        donate_argnums=0,
        out_shardings=step.shardings,
    )
    return step, add_one


@pytest.mark.parametrize("trains", [False, slow(True)])
def test_what_is_saved_while_the_run_goes_on_is_the_state_of_its_step(trains, tmp_path):
    """Steps take the state's own memory: on CPUs, where the copy could be none."""
    step, next_of = counting_step()
    if trains:
        state, next_of = step.init(seed=0), lambda state: step(state, tokens_of(0))[0]
    else:
        state = drawn(step, scale=1.0)
    states = {}
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        for _ in range(3):
            state = next_of(state)
            states[int(state.step)] = jax.tree.map(np.array, state)
            checkpoints.save(state, RUN, wait=False)
        next_of(state)
    for steps_done, kept in states.items():
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.newest_good(at_most=steps_done) == steps_done
            restored = checkpoints.restore(step.state_shapes, step.shardings)
        assert_bitwise_equal(restored, kept)


@pytest.mark.parametrize("until", ["begun", "written"])
def test_a_step_takes_the_states_memory_while_it_is_saved(until, tmp_path, monkeypatch):
    step, next_of = counting_step()
    state = next_of(drawn(step, scale=1.0))  # Of XLA's memory, not of NumPy's.
    kept = jax.tree.map(np.array, state)
    may_go_on = threading.Event()
    with Checkpoints(tmp_path) as checkpoints:
        name = {"begun": "save", "written": "wait_until_finished"}[until]
        hold_back(checkpoints._manager, name, may_go_on, monkeypatch)
        checkpoints.save(state, RUN, wait=False)
        before = fullest_memory(state.params)
        state = next_of(state)
        assert fullest_memory(state.params) == before
        may_go_on.set()
        assert checkpoints.latest_step == 1
        restored = checkpoints.restore(step.state_shapes, step.shardings)
    assert_bitwise_equal(restored, kept)


def hold_back(manager, name, event, monkeypatch):
    """Lets a method of Orbax's manager wait for an event."""
    method = getattr(manager, name)

    def late(*args, **options):
        assert event.wait(60)
        return method(*args, **options)

    monkeypatch.setattr(manager, name, late)


def not_written(step):
    """What `refuses` takes, of a save of that step on which the disk failed."""
    return "checkpoint.not_written", step, "disk trouble"


def test_what_is_saved_is_kept_by_orbax_alone(tmp_path, monkeypatch, refuses):
    state, arrays = small_state(1), []
    is_writing, may_fail = threading.Event(), threading.Event()

    def take(step, args):
        arrays.extend(map(weakref.ref, jax.tree.leaves(args.state.item)))

    def fail():
        is_writing.set()
        assert may_fail.wait(60)
        raise OSError("disk trouble")

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", take)
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
        checkpoints.save(state, RUN, wait=False)
        assert is_writing.wait(60)
        del state
        gc.collect()
        assert arrays and not any(array() for array in arrays)
        may_fail.set()
        with refuses(*not_written(1), kind=CheckpointError):
            checkpoints.finish()
        monkeypatch.undo()


def failing(*args, **options):
    raise OSError("disk trouble")


def test_arrays_that_orbax_could_not_take_are_let_go(tmp_path, monkeypatch, refuses):
    arrays = []

    def refuse(step, args):
        arrays.extend(map(weakref.ref, jax.tree.leaves(args.state.item)))
        failing()

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", refuse)
        checkpoints.save(small_state(1), RUN, wait=False)
        futures.wait([checkpoints._saving._written], 60)
        gc.collect()
        assert arrays and not any(array() for array in arrays)
        with refuses(*not_written(1), kind=CheckpointError):
            checkpoints.finish()


def test_a_wait_that_is_interrupted_loses_no_error(tmp_path, monkeypatch, refuses):
    def interrupt():
        raise KeyboardInterrupt

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", failing)
        checkpoints.save(small_state(1), RUN, wait=False)
        with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
            stopped.setattr(checkpoints._saving, "end", interrupt)
            checkpoints.finish()
        with refuses(*not_written(1), kind=CheckpointError):
            checkpoints.finish()
    assert not logging.getLogger("absl").filters


def test_a_save_that_cannot_begin_loses_no_error_of_the_one_before(
    tmp_path, monkeypatch, refuses
):
    def no_memory(*_):
        raise MemoryError

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", failing)
        checkpoints.save(small_state(1), RUN, wait=False)
        monkeypatch.setattr(module, "copied", no_memory)
        with pytest.raises(MemoryError):
            checkpoints.save(small_state(2), RUN, wait=False)
        with refuses(*not_written(1), kind=CheckpointError):
            checkpoints.finish()


def test_a_save_that_waits_copies_nothing(tmp_path, monkeypatch):
    state, taken = small_state(1), []
    with Checkpoints(tmp_path) as checkpoints:
        save = checkpoints._manager.save

        def noted(step, args):
            taken.append(args.state.item)
            return save(step, args=args)

        monkeypatch.setattr(checkpoints._manager, "save", noted)
        checkpoints.save(state, RUN)
    assert taken[0].params["w"] is state.params["w"]


@pytest.mark.parametrize(
    "step_found",
    [
        lambda checkpoints: checkpoints.latest_step,
        lambda checkpoints: checkpoints.newest_good(),
        lambda checkpoints: checkpoints.run_of_latest()["saved"],
        lambda checkpoints: int(restore_like(checkpoints, small_state(0)).step),
    ],
    ids=["latest_step", "newest_good", "run_of_latest", "restore"],
)
def test_what_is_being_saved_is_read_once_it_is_there(
    step_found, tmp_path, monkeypatch
):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(1), {"saved": 1})
        may_go_on = threading.Event()
        hold_back(checkpoints._manager, "save", may_go_on, monkeypatch)
        checkpoints.save(small_state(2), {"saved": 2}, wait=False)
        threading.Timer(0.05, may_go_on.set).start()
        assert step_found(checkpoints) == 2


def test_a_save_after_the_end_is_refused_and_no_thread_is_left(
    tmp_path, monkeypatch, refuses
):
    before = set(threading.enumerate())
    cannot_close = OSError("cannot close")
    with pytest.raises(OSError) as caught, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(1), RUN)
        monkeypatch.setattr(
            checkpoints._manager, "close", lambda: raising(cannot_close)
        )
    assert caught.value is cannot_close
    monkeypatch.undo()
    with refuses("checkpoint.closed", tmp_path, kind=CheckpointError):
        checkpoints.save(small_state(2), RUN)
    assert checkpoints.latest_step == 1
    checkpoints._manager.close()
    assert set(threading.enumerate()) <= before


def raising(error):
    raise error


def fullest_memory(tree):
    """Where each array's shard on the first device begins."""
    return [
        array.addressable_shards[0].data.unsafe_buffer_pointer()
        for array in jax.tree.leaves(jax.block_until_ready(tree))
    ]


def changed(path, damage):
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "a bit flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    else:
        path.unlink()


def damage_told(warned, damaged, read):
    """The sentence of the one warning that names both steps, without Orbax's files."""
    ours = [one for one in warned if one.category is DamagedCheckpointWarning]
    (told,) = [str(one.message) for one in ours]
    assert names(told, damaged) and names(told, read)
    told = re.sub(r"state/[^\s:]+", "state/FILE", neutral(told))
    return re.sub(r"[\d,]{4,}", "MANY", told)


@pytest.mark.parametrize("damage", ["truncated", "a bit flipped", "gone"])
def test_of_a_damaged_newest_the_one_before_is_read_and_one_line_says_so(
    damage, tmp_path, snapshot
):
    with Checkpoints(tmp_path) as checkpoints:
        for steps_done in (3, 5):
            checkpoints.save(small_state(steps_done), {"saved": steps_done})
    files = [path for path in (tmp_path / "5" / "state").rglob("*") if path.is_file()]
    changed(max(files, key=lambda path: path.stat().st_size), damage)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(DamagedCheckpointWarning) as warned:
            assert checkpoints.run_of_latest() == {"saved": 3}
        assert damage_told(warned, 5, 3) == snapshot
        restored = restore_like(checkpoints, small_state(0))
        assert_bitwise_equal(restored, small_state(3))
        checkpoints.save(small_state(4), {"saved": 4})
        checkpoints.save(small_state(5), {"saved": "again"})
        assert checkpoints.run_of_latest() == {"saved": "again"}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["4", "5", "damaged-5"]


def test_one_without_checksums_that_cannot_be_read_is_passed_over_too(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for steps_done in (3, 5):
            checkpoints.save(small_state(steps_done), {"saved": steps_done})
    (tmp_path / "5" / "checksums.json").unlink()
    for file in (tmp_path / "5" / "run").iterdir():
        file.unlink()
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.warns(UncheckedCheckpointWarning),
        pytest.warns(DamagedCheckpointWarning) as warned,
    ):
        assert checkpoints.run_of_latest() == {"saved": 3}
    assert damage_told(warned, 5, 3)


def test_one_without_checksums_is_read_and_says_so(tmp_path, capsys):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(5), {"saved": 5})
    assert read_contents(tmp_path).has_checksums
    (tmp_path / "5" / "checksums.json").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(UncheckedCheckpointWarning) as warned:
            assert checkpoints.run_of_latest() == {"saved": 5}
            restored = restore_like(checkpoints, small_state(0))
        assert len(warned) == 1
        assert_bitwise_equal(restored, small_state(5))
    with pytest.warns(UncheckedCheckpointWarning):
        read_arrays(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "checksums none" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["moved", "gone"])
def test_a_link_is_read_and_nothing_is_saved_beside_it(target, tmp_path, refuses):
    directory = tmp_path / "run"
    with Checkpoints(directory) as checkpoints:
        for steps_done in (3, 5):
            checkpoints.save(small_state(steps_done), {"saved": steps_done})
    (directory / "5").rename(tmp_path / "moved")
    (directory / "5").symlink_to(tmp_path / target)
    with Checkpoints(directory) as checkpoints:
        wanted = 5 if target == "moved" else 3
        assert checkpoints.run_of_latest() == {"saved": wanted}
        for _ in range(2):
            with refuses("checkpoint.is_link", 5, target, kind=CheckpointError):
                checkpoints.save(small_state(6), {"saved": 6})
    assert sorted(path.name for path in directory.iterdir()) == ["3", "5"]
    assert (tmp_path / "moved" / "state").is_dir()


def test_one_whose_files_are_as_written_is_not_passed_over(
    tmp_path, monkeypatch, refuses
):
    with Checkpoints(tmp_path) as checkpoints:
        for steps_done in (3, 5):
            checkpoints.save(small_state(steps_done), {"saved": steps_done})
    with Checkpoints(tmp_path) as checkpoints:

        def fail(*_, **__):
            raise MemoryError("no memory left")

        monkeypatch.setattr(module, "read_run", fail)
        told = "checkpoint.unreadable", 5, "no memory left"
        with refuses(*told, kind=CheckpointError):
            checkpoints.run_of_latest()
        assert not checkpoints.damaged


def test_what_is_damaged_again_gets_a_name_of_its_own(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(3), {"saved": 3})
    for _ in range(2):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(small_state(5), {"saved": 5})
        (tmp_path / "5" / "checksums.json").write_text("cut")
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.newest_good() in (3, 4)
            checkpoints.save(small_state(4), {"saved": 4})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["4", "damaged-5", "damaged-5-2"]


def test_a_save_that_is_written_is_no_error_of_the_one_before(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk trouble")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(1), RUN)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._manager, "save", fail)
            checkpoints.save(small_state(2), RUN, wait=False)
        with pytest.warns(UserWarning, match=r"\b2\b.*disk trouble"):
            checkpoints.save(small_state(3), RUN)
        assert checkpoints.latest_step == 3


def test_a_last_save_that_fails_is_told_beside_the_error_that_ends_the_run(
    tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise OSError("disk trouble")

    of_the_loop = ValueError("something else")
    with (
        pytest.raises(ValueError) as caught,
        Checkpoints(tmp_path) as checkpoints,
    ):
        monkeypatch.setattr(checkpoints._manager, "save", fail)
        checkpoints.save(small_state(2), RUN, wait=False)
        raise of_the_loop
    assert caught.value is of_the_loop
    assert re.search(r"\b2\b.*disk trouble", *of_the_loop.__notes__)


def test_what_a_killed_run_has_left_half_written_is_deleted_by_the_next(tmp_path):
    parts = tmp_path / "4.orbax-checkpoint-tmp"
    parts.mkdir()
    (parts / "half").write_bytes(b"written")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step is None and parts.exists()
        checkpoints.save(small_state(5), RUN)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


def test_a_folder_that_is_gone_is_told_as_the_reason(tmp_path, snapshot):
    told = error_reason(OSError("no such thing"), tmp_path / "gone")
    assert names(told, tmp_path / "gone") and told.endswith(os.strerror(2))
    assert neutral(told) == snapshot


def test_a_save_that_orbax_skips_is_an_error(tmp_path, monkeypatch, refuses):
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", lambda *_, **__: False)
        with refuses("checkpoint.not_written", 1, tmp_path, kind=CheckpointError):
            checkpoints.save(small_state(1), RUN)


def test_saving_a_step_again_changes_nothing(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for attempt in (1, 2):
            checkpoints.save(small_state(4), {"attempt": attempt})
        assert checkpoints.run_of_latest() == {"attempt": 1}


FILL_THE_DISK = """
import resource, signal, sys
from meshpar.train.checkpoint import CheckpointError, Checkpoints
from tests.test_checkpoint import small_state

with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(small_state(1), {"disk": "has room"})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited))
    try:
        checkpoints.save(small_state(2), {"disk": "is full"})
    except CheckpointError as error:
        print("refused:", error.key, error)
    checkpoints.save(small_state(3), {"disk": "is still full"}, wait=False)
    try:
        checkpoints.save(small_state(4), {"disk": "is full for ever"}, wait=False)
    except CheckpointError as error:
        print("refused later:", error.key, error)
    try:
        checkpoints.finish()
    except CheckpointError as error:
        print("refused at last:", error.key, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    checkpoints.save(small_state(5), {"disk": "has room again"})
"""


def test_what_orbax_logs_is_kept_back_only_when_the_error_is_raised(
    tmp_path, monkeypatch, caplog, refuses
):
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "propagate", True)

    def log(*_, **__):
        try:
            raise OSError("disk trouble")
        except OSError:
            logger.exception("in a thread")

    def log_and_fail(*_, **__):
        log()
        raise OSError("disk trouble")

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", log_and_fail)
        with refuses(*not_written(1), kind=CheckpointError):
            checkpoints.save(small_state(1), RUN)
        assert "in a thread" not in caplog.text
        monkeypatch.setattr(checkpoints._manager, "save", log)
        checkpoints.save(small_state(1), RUN)
        assert "in a thread" in caplog.text
    assert not logger.filters


def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before(tmp_path):
    """A limit on the size of files stands in for the disk: either way writing fails."""
    child = run_in_child(FILL_THE_DISK, tmp_path)
    assert "_SignalingThread" not in child.stderr and "OCDBT" not in child.stderr
    for when, step in (("refused", 2), ("refused later", 3), ("refused at last", 4)):
        told = rf"^{when}: checkpoint\.not_written \D* {step} "
        assert re.search(told, child.stdout, re.MULTILINE), child.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "5"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 5
        assert checkpoints.run_of_latest() == {"disk": "has room again"}
        assert checkpoints.newest_good(at_most=1) == 1
        assert checkpoints.run_of_latest() == {"disk": "has room"}
        assert_bitwise_equal(restore_like(checkpoints, small_state(0)), small_state(1))
