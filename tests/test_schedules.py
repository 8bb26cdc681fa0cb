"""Schedules as data: work once, closed forms, published bubbles, errors."""

import json
from collections import Counter
from fractions import Fraction
from itertools import accumulate, combinations
from pathlib import Path

import numpy as np
import pytest
from schedule_cases import (
    ALL,
    NAMED,
    NAMES,
    SIZES,
    SPLIT_NAMES,
    label,
    split_1f1b,
    v_shaped,
)

from meshpar.schedules import (
    SCHEDULES,
    Action,
    Limits,
    Op,
    Schedule,
    StageTimes,
    check_schedule,
    make_schedule,
    peak_in_flight,
    search_schedule,
    simulate,
    tick_table,
    zero_bubble_paper_hop,
)
from tests.marks import slow

PUBLISHED = json.loads(
    (Path(__file__).parent / "data" / "zero_bubble_bubbles.json").read_text()
)["rows"]


# Orders.


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_every_schedule_does_all_work_exactly_once_and_passes_the_checker(schedule):
    counts = Counter(action for order in schedule.orders for action in order)
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    backwards = "IW" if schedule.splits_backward else "B"
    split = schedule.with_split_backwards() if schedule.splits_backward else schedule
    assert Counter(action for order in split.orders for action in order) == Counter(
        Action.parse(f"{stage}{op}{microbatch}")
        for stage in range(stages)
        for op in "F" + backwards
        for microbatch in range(microbatches)
    )
    assert max(counts.values()) == 1
    if schedule.name in SCHEDULES:
        assert schedule.splits_backward <= SCHEDULES[schedule.name].splits_backward
    check_schedule(schedule)


def test_the_registry_and_the_test_list_name_the_same_schedules():
    assert set(SCHEDULES) == set(NAMES)
    assert {name for name, *_ in NAMED} == set(NAMES)


@pytest.mark.parametrize(
    "name, chunks, rows",
    [
        ("gpipe", 1, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", 1, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        (
            "interleaved_1f1b",
            2,  # one group of three: three forwards of chunk 0, then chunk 1
            [
                "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
                "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
            ],
        ),
        (
            "looped_bfs",
            2,
            [
                "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
                "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
            ],
        ),
    ],
)
def test_orders_are_the_papers_own(name, chunks, rows):
    schedule = make_schedule(name, 2, 3, chunks)
    assert [" ".join(map(str, order)) for order in schedule.orders] == rows


def test_interleaved_with_one_chunk_is_1f1b():
    for ranks, microbatches in SIZES:
        interleaved = make_schedule("interleaved_1f1b", ranks, microbatches, 1)
        assert interleaved.orders == make_schedule("1f1b", ranks, microbatches).orders


def test_a_stage_lies_on_the_rank_whose_order_names_it():
    schedule = v_shaped(num_ranks=3)
    assert schedule.stages_of_rank == ((0, 5), (1, 4), (2, 3))
    assert make_schedule("looped_bfs", 3, 2, 2).stages_of_rank[1] == (1, 4)


@pytest.mark.parametrize("name, ranks, microbatches, chunks", NAMED)
def test_stages_lie_where_the_schedule_says(name, ranks, microbatches, chunks):
    schedule = make_schedule(name, ranks, microbatches, chunks)
    for rank, stages in enumerate(schedule.stages_of_rank):
        assert stages == (*SCHEDULES[name].stages_of(rank, ranks, chunks),)


@pytest.mark.parametrize("name, ranks, microbatches, chunks", NAMED)
def test_a_schedule_that_a_search_leaves_out_is_no_better(
    name, ranks, microbatches, chunks
):
    other = SCHEDULES[name].no_better_than
    if other is None:
        return
    worse = make_schedule(name, ranks, microbatches, chunks)
    better = make_schedule(other, ranks, microbatches, chunks)
    assert simulate(worse).span_s == simulate(better).span_s
    ticks = [tick_table(schedule) for schedule in (worse, better)]
    assert ticks[0].num_forward_ticks == ticks[1].num_forward_ticks
    assert ticks[0].num_backward_ticks == ticks[1].num_backward_ticks
    for held, least in (
        (peak_in_flight(worse), peak_in_flight(better)),
        (ticks[0].peak_in_flight, ticks[1].peak_in_flight),
    ):
        assert all(more >= less for more, less in zip(held, least, strict=True))


# Bubbles.


# (p-1)/(m+p-1), and (p-1)/(v m + p-1), as the papers print them.
PRINTED = [
    ("gpipe", 4, 8, 1, Fraction(3, 11)),
    ("1f1b", 4, 8, 1, Fraction(3, 11)),
    ("1f1b", 4, 2, 1, Fraction(3, 5)),
    ("interleaved_1f1b", 4, 8, 2, Fraction(3, 19)),
    ("looped_bfs", 4, 8, 3, Fraction(3, 27)),
]


@pytest.mark.parametrize("name, ranks, microbatches, chunks, bubble", PRINTED)
def test_closed_forms_are_those_of_the_papers(
    name, ranks, microbatches, chunks, bubble
):
    length = SCHEDULES[name].closed_forms.length(ranks, microbatches, chunks)
    assert Fraction(length - chunks * microbatches, length) == bubble


KNOWN = [case for case in NAMED if SCHEDULES[case[0]].closed_forms]


@pytest.mark.parametrize("name, ranks, microbatches, chunks", KNOWN)
@pytest.mark.parametrize("forward, input_grad, weight_grad", [(1, 1, 1), (3, 5, 0)])
def test_bubbles_are_the_closed_forms_exactly_without_latency(
    name, ranks, microbatches, chunks, forward, input_grad, weight_grad
):
    schedule = make_schedule(name, ranks, microbatches, chunks)
    times = StageTimes.uniform(
        schedule.num_stages,
        forward_s=forward,
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
    )
    timeline = simulate(schedule, times)
    work = chunks * microbatches
    length = SCHEDULES[name].closed_forms.length(ranks, microbatches, chunks)
    assert timeline.span_s == length * (forward + input_grad + weight_grad)
    assert timeline.bubble_fraction == (length - work) / length


published = pytest.mark.parametrize(
    "row",
    [*PUBLISHED[:4], *map(slow, PUBLISHED[4:])],
    ids=lambda row: f"{row['p']}-{row['m']}",
)


@published
def test_published_bubbles_of_1f1b_come_out_of_the_replay(row):
    bubble = published_replay(row, "1f1b", 1, row["Tcomm"])
    assert round(bubble, 4) == row["bubble"]["1F1B"]


@published
@pytest.mark.parametrize(
    "column, name", [("ZB-H1", "zero_bubble_h1"), ("ZB-H2", "zero_bubble_h2")]
)
def test_published_zero_bubble_orders_come_out_of_the_replay(row, column, name):
    bubble = published_replay(row, name, 1, row["Tcomm"])
    assert round(bubble, 4) == row["bubble"][column]


@published
@pytest.mark.parametrize(
    "column, memory, margin", [("ZB-1p", 1, 0.00005), ("ZB-2p", 2, 0.003)]
)
def test_a_searched_order_is_as_short_as_the_papers(row, column, memory, margin):
    ranks, hop_s = row["p"], row["Tcomm"]
    limits = Limits(memory=memory * ranks, stash=row["MW"])
    times = StageTimes.uniform(
        ranks, forward_s=row["TF"], input_grad_s=row["TB"], weight_grad_s=row["TW"]
    )
    found = search_schedule(row["m"], times, limits=limits, hop_s=hop_s)
    check_schedule(found)
    assert all(map(limits.allow, found.orders))
    bubble = simulate(found, times, hop_s=hop_s).bubble_fraction
    assert bubble <= row["bubble"][column] + margin


@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (2, 3), (4, 7), (4, 12)])
def test_zero_bubble_v_has_none_in_the_memory_of_1f1b(ranks, microbatches):
    schedule = make_schedule("zero_bubble_v", ranks, microbatches)
    assert simulate(schedule).bubble_fraction == 0
    most = max(peak_in_flight(make_schedule("1f1b", ranks, microbatches)))
    assert max(peak_in_flight(schedule)) <= 2 * most  # of half a stage each


@pytest.mark.parametrize("name, share", [("v_half", 1 / 2), ("v_min", 1 / 3)])
@pytest.mark.parametrize("ranks", [4, 7, 12, 24])
def test_v_schedules_hold_their_share_of_1f1b_and_a_constant(name, share, ranks):
    schedule = make_schedule(name, ranks, 3 * ranks)
    check_schedule(schedule)
    assert max(peak_in_flight(schedule)) <= share * 2 * ranks + 3
    shorter = simulate(make_schedule("1f1b", ranks, 3 * ranks)).bubble_fraction
    assert simulate(schedule).bubble_fraction < shorter


@pytest.mark.parametrize(
    "ranks, microbatches, memory",
    [(2, 2, 2), (2, 3, 2), slow(3, 3, 3), slow(2, 4, 3)],
)
@pytest.mark.parametrize("forward, input_grad, weight_grad", [(1, 1, 1), (2, 3, 1)])
def test_a_searched_order_is_near_the_shortest_that_there_is(
    ranks, microbatches, memory, forward, input_grad, weight_grad
):
    times = StageTimes.uniform(
        ranks,
        forward_s=forward,
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
    )
    found = search_schedule(microbatches, times, limits=Limits(memory=memory))
    least = shortest_end_s(ranks, microbatches, times, memory)
    assert least - 1e-6 <= simulate(found, times).end_s <= 1.1 * least


@pytest.mark.parametrize(
    "limits, refusal",
    [
        (dict(memory=0.5), ("schedule.too_little_memory", "memory=0.5", "1.0")),
        (dict(memory=2, stash=3.0), ("schedule.too_little_memory", "memory=2", "3.0")),
        (dict(memory=2, pending=0), ("schedule.too_few_pending", "pending=0", "1")),
    ],
)
def test_limits_that_no_order_keeps_are_refused(limits, refusal, refuses):
    with refuses(*refusal):
        Limits(**limits)


@pytest.mark.parametrize("pending", [1, 2])
def test_no_more_weight_gradients_wait_than_allowed(pending):
    limits = Limits(memory=30, stash=4.0, pending=pending)
    found = search_schedule(9, StageTimes.uniform(4), limits=limits)
    check_schedule(found)
    for order in found.orders:
        waiting = accumulate((a.op is Op.I) - (a.op is Op.W) for a in order)
        assert max(waiting) <= pending


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("ranks, microbatches", [(2, 5), (4, 7), (4, 12)])
@pytest.mark.parametrize("name", SPLIT_NAMES)
def test_a_limit_moves_weight_gradients_only(name, ranks, microbatches, count):
    free = make_schedule(name, ranks, microbatches)
    limited = make_schedule(name, ranks, microbatches, max_pending_w=count)
    check_schedule(limited)
    for order, other in zip(free.orders, limited.orders, strict=True):
        if name != "auto":  # whose search takes the limit into account
            kept = [action for action in order if action.op is not Op.W]
            assert kept == [action for action in other if action.op is not Op.W]
        waiting = accumulate((a.op is Op.I) - (a.op is Op.W) for a in other)
        assert max(waiting) <= count
    for divergent in (False, True):
        assert max(tick_table(limited, divergent=divergent).stash_slots) <= count


def test_a_limit_that_nothing_reaches_changes_nothing():
    limited = make_schedule("zero_bubble_h2", 4, 9, max_pending_w=7)
    assert limited.orders == make_schedule("zero_bubble_h2", 4, 9).orders


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_a_limit_of_whole_backwards_is_refused(name, refuses):
    with refuses("schedule.nothing_pending", "max_pending_w=2", name):
        make_schedule(name, 2, 4, max_pending_w=2)


def shortest_end_s(ranks, microbatches, times, memory):
    """The least end of any order, by integer programming over pairs of actions.

    The variables are the starts, one binary of each pair of a rank's actions (which is
    first), and the end. A forward's memory is counted at its start, over all pairs.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    actions = [
        Action(rank, op, microbatch)
        for rank in range(ranks)
        for op in (Op.F, Op.I, Op.W)
        for microbatch in range(microbatches)
    ]
    at = {action: index for index, action in enumerate(actions)}
    pairs = [
        (one, other)
        for one, other in combinations(actions, 2)
        if one.stage == other.stage
    ]
    pair_at = {pair: len(actions) + index for index, pair in enumerate(pairs)}
    size = len(actions) + len(pairs) + 1
    most = sum(times.action_s(action) for action in actions)
    rows, least = [], []

    def add(bound, **terms):
        row = np.zeros(size)
        for key, factor in terms.values():
            row[key] += factor
        rows.append(row)
        least.append(bound)

    def before(one, other):
        """1 if `one` is first, as (index, factor, constant)."""
        if (one, other) in pair_at:
            return pair_at[one, other], 1, 0
        return pair_at[other, one], -1, 1

    schedule = make_schedule("zero_bubble_h1", ranks, microbatches)
    for action in actions:
        add(times.action_s(action), end=(size - 1, 1), start=(at[action], -1))
        for source in schedule.inputs(action):
            add(times.action_s(source), one=(at[action], 1), other=(at[source], -1))
    for one, other in pairs:
        for first, second in ((one, other), (other, one)):
            index, factor, constant = before(first, second)
            # start(second) >= start(first) + seconds - most * (1 - is first)
            add(
                times.action_s(first) - most + most * constant,
                late=(at[second], 1),
                early=(at[first], -1),
                order=(index, -most * factor),
            )
    for forward in (action for action in actions if action.op is Op.F):
        row, held = np.zeros(size), 1.0
        for other in actions:
            if other.stage != forward.stage or other == forward or other.op is Op.I:
                continue
            index, factor, constant = before(other, forward)
            sign = 1 if other.op is Op.F else -1
            row[index] += sign * factor
            held += sign * constant
        rows.append(-row)
        least.append(held - memory)
    integrality = np.r_[np.zeros(len(actions)), np.ones(len(pairs)), 0]
    upper = np.r_[np.full(len(actions), most), np.ones(len(pairs)), most]
    cost = np.zeros(size)
    cost[-1] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
        integrality=integrality,
        bounds=Bounds(0, upper),
    )
    assert result.success, result.message
    return result.fun


@published
def test_published_interleaved_bubbles_wait_for_one_wrap_a_group(row):
    hop = zero_bubble_paper_hop(row["p"], exact(row["Tcomm"]))
    bubble = published_replay(row, "interleaved_1f1b", row["chunks"], hop)
    assert round(bubble, 4) == row["bubble"]["1F1B-I"]


@published
def test_with_every_hop_paid_interleaved_shows_a_way_up_and_down_all_stages(row):
    ranks, chunks = row["p"], row["chunks"]
    times = published_times(row, chunks)
    schedule = make_schedule("interleaved_1f1b", ranks, row["m"], chunks)
    hop_s = exact(row["Tcomm"])
    free, paid, published = (
        simulate(schedule, times, hop_s=hop).span_s
        for hop in (0, hop_s, zero_bubble_paper_hop(ranks, hop_s))
    )
    assert paid - free == 2 * (chunks * ranks - 1) * hop_s
    assert paid - published == ranks * hop_s


def published_replay(row, name, chunks, hop_s):
    schedule = make_schedule(name, row["p"], row["m"], chunks)
    return simulate(schedule, published_times(row, chunks), hop_s=hop_s).bubble_fraction


def published_times(row, chunks):
    return StageTimes.uniform(
        row["p"] * chunks,
        forward_s=exact(row["TF"]) / chunks,
        input_grad_s=exact(row["TB"]) / chunks,
        weight_grad_s=exact(row["TW"]) / chunks,
    )


def exact(number):
    return Fraction(str(number))


def test_uneven_stages_are_held_up_by_the_slowest():
    times = StageTimes(forward_s=(1, 2), input_grad_s=(1, 2), weight_grad_s=(0, 0))
    timeline = simulate(make_schedule("gpipe", 2, 3), times)
    assert timeline.span_s == 1 + 3 * 2 + 3 * 2 + 1
    assert timeline.bubble_fraction == pytest.approx(1 - (6 + 12) / 2 / 14)


def test_a_hop_delays_who_reads_but_keeps_no_rank_busy():
    timeline = simulate(make_schedule("gpipe", 2, 2), hop_s=5)
    starts = [[event.start_s for event in events] for events in timeline.events]
    assert starts == [[0, 1, 15, 17], [6, 7, 8, 10]]


def test_weight_gradients_fill_the_bubble_of_a_split_schedule():
    split = simulate(split_1f1b(num_ranks=4, num_microbatches=8))
    assert split.span_s < simulate(make_schedule("1f1b", 4, 8)).span_s


# In flight.


@pytest.mark.parametrize("name, ranks, microbatches, chunks", KNOWN)
def test_what_is_in_flight_is_the_closed_form_or_no_less(
    name, ranks, microbatches, chunks
):
    schedule = make_schedule(name, ranks, microbatches, chunks)
    forms = SCHEDULES[name].closed_forms
    for found, known in (
        (peak_in_flight(schedule), forms.in_flight),
        (tick_table(schedule).peak_in_flight, forms.lock_step_in_flight),
    ):
        expected = known(ranks, microbatches, chunks)
        if microbatches % ranks == 0:
            assert found == expected
        assert found[0] >= expected[0]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_gpipe_keeps_all_microbatches_and_1f1b_those_behind_it(ranks, microbatches):
    gpipe = make_schedule("gpipe", ranks, microbatches)
    assert peak_in_flight(gpipe) == (microbatches,) * ranks
    one_f_one_b = make_schedule("1f1b", ranks, microbatches)
    assert peak_in_flight(one_f_one_b) == tuple(
        min(ranks - rank, microbatches) for rank in range(ranks)
    )


def test_interleaved_keeps_the_warm_up_and_one():
    schedule = make_schedule("interleaved_1f1b", 4, 8, 2)
    assert peak_in_flight(schedule) == tuple(2 * (3 - r) + 4 + 1 for r in range(4))


# Bad input.


@pytest.mark.parametrize(
    "arguments, refusal",
    [
        (("gpip", 2, 2), ("schedule.unknown_name", "gpip", "gpipe")),
        (("1f1b", 2, 0), ("schedule.not_whole_number", "microbatches=0", 1)),
        (("1f1b", 0, 2), ("schedule.not_whole_number", "stages=0", 1)),
        (("looped_bfs", 2, 2, 0), ("schedule.not_whole_number", "chunks=0", 1)),
        (("gpipe", 2, 2.0), ("schedule.not_whole_number", "microbatches=2.0")),
        (("1f1b", 2, 2, 2), ("schedule.unsupported_chunks", "chunks=2", "1f1b")),
    ],
)
def test_bad_sizes_are_refused_when_asked_for(arguments, refusal, refuses):
    with refuses(*refusal):
        make_schedule(*arguments)


def test_chunks_must_divide_over_the_ranks(refuses):
    with refuses("schedule.indivisible_stages", 3, 2):
        Schedule([[], []], num_stages=3, num_microbatches=1)


@pytest.mark.parametrize(
    "times, hop_s, refusal",
    [
        (StageTimes.uniform(3), 0, ("schedule.wrong_number_of_times", 3, 2)),
        (StageTimes.uniform(2), -1, ("schedule.wrong_hop_time", "hop_s=-1", 0)),
    ],
)
def test_times_of_another_schedule_are_refused(times, hop_s, refusal, refuses):
    with refuses(*refusal):
        simulate(make_schedule("1f1b", 2, 2), times, hop_s=hop_s)


def test_times_are_finite_and_one_a_stage(refuses):
    with refuses("schedule.wrong_time", "forward_s=nan"):
        StageTimes.uniform(2, forward_s=float("nan"))
    with refuses("schedule.uneven_times", "input_grad_s", 1, "forward_s", 2):
        StageTimes(forward_s=(1, 1), input_grad_s=(1,), weight_grad_s=(1, 1))
