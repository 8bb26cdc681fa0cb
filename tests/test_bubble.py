"""The printed bubbles are the closed forms, and the clock's for steps of known time."""

import time

import numpy as np
import pytest

from meshpar.recipes import bubble
from meshpar.schedules import make_schedule

NUM_LAYERS = 12


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stage", "microbatches"), [(1, 3), (2, 4), (3, 7), (4, 32)])
def test_even_stages_idle_as_long_as_the_pipeline_fills(schedule, stage, microbatches):
    orders = make_schedule(schedule, stage, microbatches)
    expected = (stage - 1) / (microbatches + stage - 1)
    sizes = (NUM_LAYERS // stage,) * stage
    assert bubble.predicted_bubble(orders, sizes) == pytest.approx(expected)


def test_places_without_a_layer_count_as_idle():
    """Two stages of 8 and 4 layers run as two of 8: of 2 x 5 x 8 places 4 x 12 work."""
    schedule = make_schedule("1f1b", 2, 4)
    assert bubble.predicted_bubble(schedule, (8, 4)) == pytest.approx(1 - 48 / 80)


def test_more_chunks_idle_less():
    chunked = make_schedule("interleaved_1f1b", 2, 4, chunks=2)
    plain = make_schedule("1f1b", 2, 4)
    assert bubble.predicted_bubble(chunked, (3,) * 4) < bubble.predicted_bubble(
        plain, (6, 6)
    )


class Clock:
    """Steps of known time: `once_s`, and `each_s` for every example."""

    def __init__(self, once_s, each_s):
        self.now_s, self.once_s, self.each_s = 0.0, once_s, each_s

    def step(self, state, batch):
        slow_first = 100.0 if state < 2 else 0.0
        self.now_s += self.once_s + self.each_s * len(batch["tokens"]) + slow_first
        return state + 1, {}


def test_measured_is_the_part_of_a_step_that_does_not_grow_with_its_batch(monkeypatch):
    clock = Clock(once_s=0.5, each_s=0.25)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    batch = {"tokens": np.zeros((8, 4), np.int32)}
    found = bubble.measured_bubble(clock.step, clock.step, 0, batch, rounds=3)
    assert found.step_s == pytest.approx(2.5)
    assert found.useful_s == pytest.approx(2.0)
    assert found.fraction == pytest.approx(0.2)
