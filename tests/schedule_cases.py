"""Schedules that every property of schedules is tested on."""

from meshpar.schedules import SCHEDULES, Action, Op, Schedule, make_schedule

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 3), (4, 2), (4, 7), (4, 8), (5, 13)]

SPLIT_NAMES = (
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
    "v_half",
    "v_min",
    "dualpipe_v",
    "auto",
)

SYNCHRONOUS = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", *SPLIT_NAMES)
"""Schedules that train as one device does."""

NAMES = (*SYNCHRONOUS, "pipedream_stash")

NAMED = [
    (name, ranks, microbatches, chunks)
    for name in NAMES
    for ranks, microbatches in SIZES
    for chunks in (1, 2, 3)
    if SCHEDULES[name].exists(ranks, microbatches, chunks)
]


def named_schedules():
    return [make_schedule(*case) for case in NAMED]


def v_orders(num_ranks, num_microbatches, chunks=2):
    """Two chunks a rank, the second on the way back: the last rank turns."""
    last = chunks * num_ranks - 1
    return [
        [
            Action(stage, op, microbatch)
            for stage, op in (
                (rank, Op.F),
                (last - rank, Op.F),
                (last - rank, Op.B),
                (rank, Op.B),
            )
            for microbatch in range(num_microbatches)
        ]
        for rank in range(num_ranks)
    ]


def v_shaped(num_ranks=3, num_microbatches=4):
    orders = v_orders(num_ranks, num_microbatches)
    return Schedule(orders, 2 * num_ranks, num_microbatches, "v_shaped")


def split_1f1b(num_ranks=4, num_microbatches=6, delay=2):
    """1F1B with every B as I and, up to `delay` actions later, W."""
    orders = []
    for order in make_schedule("1f1b", num_ranks, num_microbatches).orders:
        split, waiting = [], []
        for action in order:
            if action.op is Op.F:
                split.append(action)
                continue
            split.append(action._replace(op=Op.I))
            waiting.append(action._replace(op=Op.W))
            if len(waiting) > delay:
                split.append(waiting.pop(0))
        orders.append(split + waiting)
    return Schedule(orders, num_ranks, num_microbatches, "split_1f1b")


ALL = [*named_schedules(), v_shaped(), v_shaped(1, 2), split_1f1b(), split_1f1b(1, 3)]

LIMITED = [
    make_schedule(*case, max_pending_w=most)
    for case in NAMED
    if case[0] in SPLIT_NAMES
    for most in (1, 2)
    if most < case[2]
]
"""Schedules whose weight gradients may wait on a rank in small numbers only."""


def label(schedule):
    return (
        f"{schedule.name}-{schedule.num_ranks}-{schedule.num_microbatches}"
        f"-{schedule.num_chunks}-{schedule.max_pending_w}"
    )
