"""The checker says in words what is wrong with a schedule of one's own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import ALL, NAMED, label

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
    schedule_from_orders,
    simulate,
    tick_table,
    to_csv,
)


def rows(*orders):
    return schedule_from_orders([order.split() for order in orders])


# Words.


@pytest.mark.parametrize(
    "schedule, refusal",
    [
        (
            rows("0B1 0F0 0F1 0B0", "1F0 1F1 1B0 1B1"),
            (
                *("schedule.deadlock", "tick 0", "rank 0", "0B1", "0F1, 1B1"),
                *("rank 1", "1F0", "0F0"),
            ),
        ),
        (
            rows("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"),
            (
                *("schedule.deadlock", "tick 1", "rank 0", "0B0", "1B0"),
                *("rank 1", "1F1", "0F1"),
            ),
        ),
        (
            rows("0F0 0W0 0I0"),
            ("schedule.deadlock", "tick 1", "rank 0", "0W0", "0I0"),
        ),
        (
            rows("0F0 0F1 0B0", "1F0 1F1 1B0 1B1"),
            ("schedule.missing_work", "0B1"),
        ),
        (rows("0F0", "1F0 1B0"), ("schedule.missing_work", "0B0")),
        (rows("0F0 0I0"), ("schedule.missing_work", "0W0")),
        (rows("0F0 0F0 0B0"), ("schedule.doubled_work", "0F0")),
        (rows("0F0 0I0 0W0 0B0"), ("schedule.doubled_backward", "0B0")),
        (
            rows("0F0 0B0 1F0", "1B0"),
            ("schedule.misplaced_stage", "stage 1", "rank 0", "rank 1"),
        ),
        (
            rows("0F0 1F0 2F0 2B0 1B0 0B0", "3F0 3B0"),
            ("schedule.too_many_stages", "rank 0", "0, 1, 2", "2 of 4", "2 ranks"),
        ),
        (
            Schedule([[Action.parse(text) for text in ("0F0", "0B0", "0F7")]], 1, 1),
            ("schedule.unknown_work", 1, "0F7"),
        ),
    ],
)
def test_the_checker_names_who_waits_for_what_and_which_work_is_wrong(
    schedule, refusal, refuses
):
    for use in (check_schedule, simulate, tick_table):
        with refuses(*refusal, kind=ScheduleError, words=use is check_schedule):
            use(schedule)


def test_a_long_list_of_missing_work_is_cut(refuses):
    with refuses("schedule.missing_work", "0F0", 12, kind=ScheduleError):
        check_schedule(Schedule([[], []], num_stages=2, num_microbatches=5))


def test_over_full_buffers_are_named_with_both_numbers(refuses):
    schedule = make_schedule("gpipe", 2, 4)
    check_schedule(schedule, max_in_flight=4)
    values = ("rank 1", 4, "1F3", 3)
    with refuses("schedule.overfull_buffers", *values, kind=ScheduleError):
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
    "text, refusal",
    [
        ("", ("schedule.no_actions", "orders.csv")),
        ("0F0,0X0", ("schedule.unreadable_action", "rank 0", "0X0")),
        ("0F0,0B0\n-1F0", ("schedule.unreadable_action", "rank 1", "-1F0")),
        ("0F0,1F0,2F0\n0B0", ("schedule.indivisible_stages", 3, 2)),
        (b"\xff\xfe\x00", ("schedule.unreadable_file", "orders.csv")),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text, refusal, tmp_path, refuses):
    path = tmp_path / "orders.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refuses(*refusal) as caught:
        read_csv(path)
    assert not isinstance(caught.value, ScheduleError)


@pytest.mark.parametrize(
    "asked, values",
    [
        ({"num_ranks": 2}, ("stages=4", "stages=2", 4)),
        ({"num_microbatches": 9}, ("microbatches=8", "microbatches=9")),
        ({"chunks": 2}, ("chunks=1", "chunks=2")),
    ],
)
def test_a_schedule_for_other_sizes_is_refused(asked, values, refuses):
    schedule = make_schedule("1f1b", 4, 8)
    check_size(schedule, num_ranks=4, num_microbatches=8, chunks=1)
    with refuses("schedule.wrong_size", *values):
        check_size(schedule, **asked)
