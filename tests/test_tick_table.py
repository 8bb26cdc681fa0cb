"""Lock step: an executor that only reads the tick table runs every schedule."""

import numpy as np
import pytest
from schedule_cases import (
    ALL,
    LIMITED,
    NAMED,
    SIZES,
    label,
    named_schedules,
    split_1f1b,
    v_shaped,
)

from meshpar.schedules import (
    SCHEDULES,
    Phase,
    StageTimes,
    lock_step_span_s,
    make_schedule,
    peak_in_flight,
    simulate,
    tick_table,
)
from meshpar.schedules.tick_table import ARRAYS


class Executor:
    """Runs a table on values that are names, in buffers of the slots it asks for."""

    def __init__(self, schedule, *, divergent=False, paired=False):
        if schedule.splits_backward:
            schedule = schedule.with_split_backwards()
        self.schedule, self.divergent = schedule, divergent
        self.table = tick_table(schedule, divergent=divergent, paired=paired)
        self.saved = self._buffers(self.table.saved_slots)
        self.stash = self._buffers(self.table.stash_slots)
        self.inputs = self._buffers(self.table.input_slots)
        self.gradients = self._buffers(self.table.gradient_slots)
        self.sent_down = [None] * schedule.num_ranks
        self.done = []

    def _buffers(self, slots):
        return [[None] * count for count in slots]

    def run(self):
        for phase in self.table.phases:
            for tick in range(phase.start, phase.stop):
                self._tick(tick, phase)
        return self.done

    def _tick(self, tick, phase):
        """One tick, with the gradients of lock step sent by the next one with any.

        Each tick of a phase with backwards sends, also if no rank has one in it.
        """
        ranks, table = range(self.schedule.num_ranks), self.table
        if phase.has_backward and not self.divergent:
            for rank in ranks:
                slots = table.gradient_arrival[tick, rank]
                self._receive(rank, slots, "gradient", self.gradients, self.sent_down)
        sent_up = [self._forward(tick, rank) for rank in ranks]
        sent_down = [self._backward(tick, rank) for rank in ranks]
        assert phase.has_forward or sent_up == [None] * len(ranks)
        assert phase.has_backward or sent_down == [None] * len(ranks)
        for rank in ranks:
            self._weight_grad(tick, rank)
        for rank in ranks:
            slots = table.input_write[tick, rank]
            self._receive(rank, slots, "input", self.inputs, sent_up)
            if self.divergent:
                slots = table.gradient_write[tick, rank]
                self._receive(rank, slots, "gradient", self.gradients, sent_down)
        if phase.has_backward:
            self.sent_down = sent_down

    def _at(self, name, tick, rank):
        return int(getattr(self.table, name)[tick, rank])

    def _forward(self, tick, rank):
        stage = self._at("forward_stage", tick, rank)
        microbatch = self._at("forward_microbatch", tick, rank)
        if stage == -1:
            return None
        if stage > 0:
            slot = self._at("input_read", tick, rank)
            assert self.inputs[rank][slot] == (stage - 1, microbatch)
        self.saved[rank][self._at("saved_write", tick, rank)] = (stage, microbatch)
        if stage == self.schedule.num_stages - 1:
            slot = self._at("loss_write", tick, rank)
            self.gradients[rank][slot] = (stage + 1, microbatch)
        chunk = self._at("forward_chunk", tick, rank)
        assert self.schedule.stages_of_rank[rank][chunk] == stage
        self.done.append(f"{stage}F{microbatch}")
        return stage, microbatch

    def _backward(self, tick, rank):
        stage = self._at("backward_stage", tick, rank)
        microbatch = self._at("backward_microbatch", tick, rank)
        if stage == -1:
            return None
        slot = self._at("saved_read", tick, rank)
        assert self.saved[rank][slot] == (stage, microbatch)
        slot = self._at("gradient_read", tick, rank)
        assert self.gradients[rank][slot] == (stage + 1, microbatch)
        chunk = self._at("backward_chunk", tick, rank)
        assert self.schedule.stages_of_rank[rank][chunk] == stage
        if self.schedule.splits_backward:
            slot = self._at("stash_write", tick, rank)
            self.stash[rank][slot] = (stage, microbatch)
        op = "I" if self.schedule.splits_backward else "B"
        self.done.append(f"{stage}{op}{microbatch}")
        return stage, microbatch

    def _weight_grad(self, tick, rank):
        stage = self._at("weight_grad_stage", tick, rank)
        microbatch = self._at("weight_grad_microbatch", tick, rank)
        if stage == -1:
            return
        slot = self._at("stash_read", tick, rank)
        assert self.stash[rank][slot] == (stage, microbatch)
        chunk = self._at("weight_grad_chunk", tick, rank)
        assert self.schedule.stages_of_rank[rank][chunk] == stage
        self.done.append(f"{stage}W{microbatch}")

    def _receive(self, rank, slots, kind, buffers, sent):
        hops = getattr(self.table, f"{kind}_hops")
        for slot, hop in zip(slots, hops, strict=True):
            if slot != -1:
                buffers[rank][slot] = sent[(rank - hop) % len(sent)]


@pytest.mark.parametrize("how", ["", "divergent", "paired"])
@pytest.mark.parametrize("schedule", [*ALL, *LIMITED], ids=label)
def test_no_live_value_is_overwritten_and_all_work_is_done_once(schedule, how):
    executor = Executor(schedule, **({how: True} if how else {}))
    done = executor.run()
    assert len(done) == len(set(done))
    assert set(done) == set(map(str, executor.schedule.actions))
    if how == "divergent":
        ticks = [name for name in ARRAYS if name.endswith("_microbatch")]
        active = sum(getattr(executor.table, name) >= 0 for name in ticks)
        assert active.max() == 1


@pytest.mark.parametrize("name, ranks, microbatches, chunks", NAMED)
def test_the_ticks_cost_what_the_replay_costs_or_more(
    name, ranks, microbatches, chunks
):
    schedule = make_schedule(name, ranks, microbatches, chunks)
    if schedule.splits_backward:
        schedule = schedule.with_split_backwards()
    table, times = tick_table(schedule), StageTimes.uniform(schedule.num_stages)
    span_s = simulate(schedule, times).span_s
    in_ticks_s = lock_step_span_s(schedule, table, times)
    assert in_ticks_s >= span_s
    if SCHEDULES[name].closed_forms:
        assert in_ticks_s == span_s


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_1f1b_in_lock_step_is_three_phases_of_the_textbook_cost(ranks, microbatches):
    table = tick_table(make_schedule("1f1b", ranks, microbatches))
    length = microbatches + ranks - 1
    assert (table.num_forward_ticks, table.num_backward_ticks) == (length, length)
    assert table.num_ticks == microbatches + 2 * (ranks - 1)
    forward_only = [Phase(True, False, 0, ranks - 1)] if ranks > 1 else []
    assert list(table.phases)[: len(forward_only)] == forward_only
    if microbatches >= ranks > 1:
        assert table.phases[1:] == (
            Phase(True, True, ranks - 1, length),
            Phase(False, True, length, table.num_ticks),
        )


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_1f1b_in_lock_step_holds_the_way_to_the_last_rank_and_back(ranks, microbatches):
    table = tick_table(make_schedule("1f1b", ranks, microbatches))
    assert table.peak_in_flight == tuple(
        min(2 * (ranks - rank) - 1, microbatches) for rank in range(ranks)
    )


@pytest.mark.parametrize("microbatches", [8, 32, 128])
def test_buffers_of_1f1b_do_not_grow_with_the_microbatches(microbatches):
    table = tick_table(make_schedule("1f1b", 4, microbatches))
    assert table.saved_slots == (7, 5, 3, 1)
    assert table.input_slots == (0, 1, 1, 1)
    assert table.gradient_slots == (1, 1, 1, 1)


def test_interleaved_in_lock_step_holds_no_more_than_in_its_own_order():
    schedule = make_schedule("interleaved_1f1b", 4, 16, 2)
    assert tick_table(schedule).peak_in_flight == peak_in_flight(schedule)


@pytest.mark.parametrize("schedule", named_schedules(), ids=label)
def test_phases_cover_the_ticks_and_say_which_kinds_they_hold(schedule):
    table = tick_table(schedule)
    assert len(table.phases) <= (12 if schedule.splits_backward else 3)
    assert [phase.start for phase in table.phases[1:]] == [
        phase.stop for phase in table.phases[:-1]
    ]
    assert (table.phases[0].start, table.phases[-1].stop) == (0, table.num_ticks)
    for phase in table.phases:
        for has, name in (
            (phase.has_forward, "forward_stage"),
            (phase.has_backward, "backward_stage"),
            (phase.has_weight_grad, "weight_grad_stage"),
        ):
            stages = getattr(table, name)[phase.start : phase.stop]
            busy = (stages != -1).any(axis=1)
            if len(table.phases) > 3 or not schedule.splits_backward:
                assert (busy == has).all()
            assert has or not busy.any()


def test_arrays_are_int32_of_ticks_by_ranks():
    table = tick_table(make_schedule("interleaved_1f1b", 2, 4, 2))
    arrays = {
        name: value
        for name, value in vars(table).items()
        if isinstance(value, np.ndarray)
    }
    assert len(arrays) == len(ARRAYS) == 18
    for name, array in arrays.items():
        hops = (1,) if name in ("input_write", "gradient_write") else ()
        assert array.shape == (table.num_ticks, 2, *hops)
        assert array.dtype == np.int32


@pytest.mark.parametrize(
    "schedule, up, down",
    [
        (make_schedule("1f1b", 4, 8), (1,), (3,)),
        (make_schedule("interleaved_1f1b", 4, 8, 2), (1,), (3,)),
        (make_schedule("looped_bfs", 1, 2, 2), (0,), (0,)),
        (make_schedule("gpipe", 1, 2), (), ()),
        (v_shaped(num_ranks=3), (0, 1, 2), (0, 2, 1)),
    ],
)
def test_a_ring_has_one_hop_each_way_and_a_v_turns_and_goes_back(schedule, up, down):
    table = tick_table(schedule)
    assert (table.input_hops, table.gradient_hops) == (up, down)


def test_what_w_reads_stays_in_the_stash_and_what_i_reads_until_i():
    schedule = split_1f1b(num_ranks=2, num_microbatches=4, delay=3)
    table = tick_table(schedule, divergent=True)
    assert (table.saved_slots, table.stash_slots) == ((2, 1), (4, 4))
    table = tick_table(schedule)
    assert (table.saved_slots, table.stash_slots) == ((3, 1), (1, 2))
