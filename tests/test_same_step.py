"""Processes compare the step and the parameters that they are about to train."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import make_train_step
from meshpar.distributed import Processes
from meshpar.models.presets import build
from meshpar.train.same_step import _CALLBACK, check_same_step


def step_of(learning_rate=0.1, layout="fsdp=2"):
    return make_train_step(
        build("test"), optax.sgd(learning_rate), layout, devices=jax.devices()[:2]
    )


@pytest.fixture(scope="module")
def started():
    """A step, and its first state."""
    step = step_of()
    return step, step.init(seed=0)


@pytest.fixture(scope="module")
def batch(started):
    tokens = np.zeros((4, 8), np.int32)
    weights = np.ones((4, 8), np.float32)
    return started[0].place({"tokens": tokens, "targets": tokens, "weights": weights})


def beside(*others):
    """Processes whose answers are this one's and those of others before it."""

    def gather(value):
        seen.append(value)
        return [*others, value]

    seen = []
    return SimpleNamespace(num_processes=len(others) + 1, gather=gather, seen=seen)


@pytest.fixture(scope="module")
def first(started, batch):
    """What the first process gathers."""
    processes = beside()
    processes.num_processes = 2
    check_same_step(processes, *started, batch)
    return processes.seen[0]


def test_the_same_step_and_parameters_are_taken(started, first, batch):
    check_same_step(beside(first), step_of(), started[1], batch)
    check_same_step(Processes(), None, None, batch)  # Alone: nothing is looked at.


def test_another_step_is_refused(started, first, batch, refuses):
    step = step_of(learning_rate=0.2)
    with refuses("processes.different_step", "process 2", "process 0", words=False):
        check_same_step(beside(first, first), step, started[1], batch)


def test_the_address_of_a_callback_makes_no_other_step(started):
    def lowered():
        def function(x):
            return jax.pure_callback(lambda x: np.asarray(x), x, x)

        return jax.jit(function).lower(jnp.ones(3)).as_text()

    one, other = lowered(), lowered()
    assert _CALLBACK.search(one)
    assert _CALLBACK.sub("callback", one) == _CALLBACK.sub("callback", other)


def test_other_parameters_are_refused_by_name(started, first, batch, refuses):
    step, state = started
    with refuses("processes.different_parameters", "process 1", "process 0"):
        check_same_step(beside(first), step, _changed(state), batch)
    name = next(iter(first[1]))
    other = [first[0], {name: first[1][name] + 1}]  # It holds this shard alone.
    with refuses("processes.different_parameters", "process 1", name, words=False):
        check_same_step(beside(other), step, state, batch)


def _changed(state):
    """The state with one bit of one parameter flipped."""
    arrays, tree = jax.tree.flatten(state.params)
    changed = np.array(arrays[0])
    changed.view(np.uint8).reshape(-1)[-1] ^= 1
    arrays[0] = jax.device_put(changed, arrays[0].sharding)
    return SimpleNamespace(params=jax.tree.unflatten(tree, arrays))
