"""The checker says in words what is wrong with a schedule of one's own."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import ALL, NAMED, label

from meshpar import InputError
from meshpar.schedules import (
    Action,
    Schedule,
    ScheduleError,
    check_schedule,
    check_size,
    make_schedule,
    peak_in_flight,
    problems,
    read_csv,
    schedule_of,
    simulate,
    tick_table,
    to_csv,
)


def rows(*orders):
    return schedule_of([order.split() for order in orders])


# Words.


@pytest.mark.parametrize(
    "schedule, message",
    [
        (
            rows("0B1 0F0 0F1 0B0", "1F0 1F1 1B0 1B1"),
            "deadlock at tick 0:\n"
            "  rank 0 wants 0B1, which needs 0F1, 1B1\n"
            "  rank 1 wants 1F0, which needs 0F0",
        ),
        (
            rows("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"),
            "deadlock at tick 1:\n"
            "  rank 0 wants 0B0, which needs 1B0\n"
            "  rank 1 wants 1F1, which needs 0F1",
        ),
        (
            rows("0F0 0W0 0I0"),
            "deadlock at tick 1:\n  rank 0 wants 0W0, which needs 0I0",
        ),
        (rows("0F0 0F1 0B0", "1F0 1F1 1B0 1B1"), "missing work: 0B1"),
        (rows("0F0", "1F0 1B0"), "missing work: 0B0"),
        (rows("0F0 0I0"), "missing work: 0W0"),
        (rows("0F0 0F0 0B0"), "doubled work: 0F0"),
        (rows("0F0 0I0 0W0 0B0"), "doubled work, as B and as I or W: 0B0"),
        (
            rows("0F0 0B0 1F0", "1B0"),
            "misplaced stage: stage 1 is on rank 0 and on rank 1; its parameters are "
            "on one",
        ),
        (
            rows("0F0 1F0 2F0 2B0 1B0 0B0", "3F0 3B0"),
            "misplaced stage: rank 0 has stages 0, 1, 2, more than the 2 of 4 stages "
            "over 2 ranks",
        ),
        (
            Schedule([[Action.parse(text) for text in ("0F0", "0B0", "0F7")]], 1, 1),
            "work that 1 stages and 1 microbatches do not have: 0F7",
        ),
    ],
)
def test_the_checker_names_who_waits_for_what_and_which_work_is_wrong(
    schedule, message
):
    with pytest.raises(ScheduleError, match=f"(?m)^{re.escape(message)}$"):
        check_schedule(schedule)
    for use in (simulate, tick_table):
        with pytest.raises(ScheduleError, match=re.escape(message)):
            use(schedule)


def test_a_long_list_of_missing_work_is_cut():
    with pytest.raises(ScheduleError, match="missing work: 0F0, .* and 12 more$"):
        check_schedule(Schedule([[], []], num_stages=2, num_microbatches=5))


def test_over_full_buffers_are_named_with_both_numbers():
    schedule = make_schedule("gpipe", 2, 4)
    check_schedule(schedule, max_in_flight=4)
    message = (
        "over-full buffers: rank 1 holds 4 microbatches at 1F3, but has room for 3"
    )
    with pytest.raises(ScheduleError, match=message):
        check_schedule(schedule, max_in_flight=3)


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_buffers_of_the_peak_in_flight_are_large_enough(schedule):
    peak = max(peak_in_flight(schedule))
    assert problems(schedule, max_in_flight=peak) == []
    assert problems(schedule, max_in_flight=peak - 1) != []


# Properties.


@settings(deadline=None, max_examples=100)
@given(case=st.sampled_from(NAMED), data=st.data())
def test_one_action_left_out_or_doubled_is_always_named(case, data):
    schedule = make_schedule(*case)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    index = data.draw(st.integers(0, len(schedule.orders[rank]) - 1))
    copies = data.draw(st.sampled_from([0, 2]))
    orders = [list(order) for order in schedule.orders]
    action = orders[rank][index]
    orders[rank][index : index + 1] = [action] * copies
    changed = Schedule(orders, schedule.num_stages, schedule.num_microbatches)
    word = "doubled" if copies else "missing"
    assert f"{word} work: {action}" in problems(changed)


@settings(deadline=None, max_examples=100)
@given(
    orders=st.permutations(make_schedule("1f1b", 2, 2).orders[0]).flatmap(
        lambda first: st.tuples(
            st.just(first), st.permutations(make_schedule("1f1b", 2, 2).orders[1])
        )
    )
)
def test_the_checker_passes_exactly_what_runs_to_its_end(orders):
    schedule = Schedule(orders, num_stages=2, num_microbatches=2)
    assert (problems(schedule) == []) == runs_to_its_end(schedule)


def runs_to_its_end(schedule):
    """Whether the order of each rank and the data dependencies hold no cycle."""
    edges = {
        action: set(schedule.inputs(action)) | ({order[index - 1]} if index else set())
        for order in schedule.orders
        for index, action in enumerate(order)
    }
    done = set()
    for _ in edges:
        done |= {action for action, sources in edges.items() if sources <= done}
    return len(done) == len(edges)


# Text.


@pytest.mark.parametrize("schedule", ALL, ids=label)
def test_csv_reads_back_exactly(schedule, tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text(to_csv(schedule))
    read = read_csv(path)
    assert read.orders == schedule.orders
    assert read.num_stages == schedule.num_stages
    assert read.num_microbatches == schedule.num_microbatches


def test_empty_cells_and_spaces_of_a_csv_are_skipped(tmp_path):
    path = tmp_path / "orders.csv"
    path.write_text("0F0,,,0B0\r\n,1F0, 1B0,\r\n\n")
    orders = read_csv(path).orders
    assert [list(map(str, order)) for order in orders] == [
        ["0F0", "0B0"],
        ["1F0", "1B0"],
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no actions; give one order a rank"),
        ("0F0,0X0", "rank 0: '0X0' is no action; write the stage, F, B, I or W"),
        ("0F0,0B0\n-1F0", "rank 1: '-1F0' is no action"),
        ("0F0,1F0,2F0\n0B0", "3 stages do not divide over 2 ranks"),
        (b"\xff\xfe\x00", "is no text"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text, message, tmp_path):
    path = tmp_path / "orders.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_csv(path)
    assert not isinstance(caught.value, ScheduleError)


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"num_ranks": 2}, "has stages=4, but stages=2 was asked for; ask for 4"),
        ({"num_microbatches": 9}, "has microbatches=8, but microbatches=9 was asked"),
        ({"chunks": 2}, "has chunks=1, but chunks=2 was asked for"),
    ],
)
def test_a_schedule_for_other_sizes_is_refused(asked, message):
    schedule = make_schedule("1f1b", 4, 8)
    check_size(schedule, num_ranks=4, num_microbatches=8, chunks=1)
    with pytest.raises(InputError, match=message):
        check_size(schedule, **asked)
