"""Phases, what is in flight over time, and the timeline in lock step."""

import pytest
from schedule_cases import ALL, label

from meshpar.schedules import (
    Op,
    StageTimes,
    lock_step_span_s,
    make_schedule,
    peak_in_flight,
    simulate,
    tick_table,
)
from meshpar.schedules.simulate import Kept, Memory, in_flight, spans
from meshpar.schedules.ticks import ticks_timeline

every_schedule = pytest.mark.parametrize("schedule", ALL, ids=label)


def times_of(schedule):
    stages = range(schedule.num_stages)
    return StageTimes(
        forward_s=[2 + stage % 3 for stage in stages],
        input_grad_s=[3 + stage % 2 for stage in stages],
        weight_grad_s=[1] * schedule.num_stages,
    )


@every_schedule
def test_most_in_flight_over_time_is_the_peak_that_is_reported(schedule):
    counts = in_flight(simulate(schedule, times_of(schedule)))
    peaks = tuple(max(number for _, number in of_rank) for of_rank in counts)
    assert peaks == peak_in_flight(schedule)
    for of_rank in counts:
        assert of_rank[-1].number == 0
        assert list(of_rank) == sorted(of_rank, key=lambda count: count.since_s)


@every_schedule
def test_phases_follow_one_another_and_have_what_their_names_say(schedule):
    timeline = simulate(schedule, times_of(schedule))
    found = spans(timeline)
    assert (found[0].start_s, found[-1].end_s) == (0, timeline.end_s)
    for span, following in zip(found, found[1:], strict=False):
        assert span.end_s == following.start_s
    (warm_up,) = (span for span in found if span.name == "warm-up")
    (cool_down,) = (span for span in found if span.name == "cool-down")
    for events in timeline.events:
        for action, start_s, end_s in events:
            if action.op is Op.F:
                assert end_s <= cool_down.start_s
            else:
                assert start_s >= warm_up.end_s


def test_gpipe_of_even_stages_has_nothing_steady():
    names = [span.name for span in spans(simulate(make_schedule("gpipe", 4, 8)))]
    assert names == ["warm-up", "cool-down"]


@every_schedule
def test_lock_step_takes_its_span_and_holds_its_slots(schedule):
    times, table = times_of(schedule), tick_table(schedule)
    timeline = ticks_timeline(schedule, times)
    span_s = lock_step_span_s(schedule, table, times)
    assert timeline.end_s <= span_s
    even = StageTimes.uniform(schedule.num_stages)
    if not any(action.op is Op.I for action in schedule.actions):
        assert ticks_timeline(schedule, even).end_s == lock_step_span_s(
            schedule, table, even
        )
        peaks = [max(number for _, number in of) for of in in_flight(timeline)]
        assert tuple(peaks) == table.peak_in_flight


@every_schedule
def test_in_lock_step_too_every_action_starts_when_its_inputs_are_there(schedule):
    timeline = ticks_timeline(schedule, times_of(schedule))
    event_of = {event.action: event for events in timeline.events for event in events}
    schedule = timeline.schedule  # with all backwards split, if any is
    assert event_of.keys() == schedule.actions
    for action, event in event_of.items():
        for source in schedule.inputs(action):
            assert event_of[source].end_s <= event.start_s
    for events in timeline.events:
        for event, following in zip(events, events[1:], strict=False):
            assert event.end_s <= following.start_s


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_memory_is_what_forwards_and_input_gradients_have_left(name):
    timeline = simulate(make_schedule(name, 4, 7))
    kept = Kept(forward=3, stash=2)
    for events, counts in zip(timeline.events, in_flight(timeline, kept), strict=True):
        ends = {event.action: event.end_s for event in events}
        starts = {event.action: event.start_s for event in events}
        for now in (half + 0.5 for half in range(int(timeline.end_s))):
            held = 0
            for action in (one for one in starts if one.op is Op.F):
                left = [ends.get(action._replace(op=op)) for op in (Op.B, Op.I, Op.W)]
                whole, of_input, of_weights = left
                released = whole if of_input is None else of_input
                held += 3 * (starts[action] < now < released)
                if of_input is not None:
                    held += 2 * (of_input < now < of_weights)
            assert [number for since, number in counts if since < now][-1] == held


def test_peak_memory_is_of_a_rank_whatever_its_chunks():
    for name, peaks in (("1f1b", [400, 300, 200, 100]), ("zero_bubble_v", [400] * 4)):
        timeline = simulate(make_schedule(name, 4, 8))
        assert Memory(100, stash=0.5).peak_mb(timeline) == peaks
