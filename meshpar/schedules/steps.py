"""Orders written as steps: each names an operation and a chunk, and counts by itself.

`F0` is the next forward of the rank's chunk 0. `I0` and `B0` are its next backward, for
the input alone or whole. `W` is the weight gradient of the earliest `I` that lacks one,
whatever its chunk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from meshpar.schedules.base import Action, Op
from meshpar.schedules.method import Orders


def numbered(
    steps: Iterable[str], stages: Sequence[int], num_microbatches: int
) -> tuple[Action, ...]:
    """Return the actions of a rank's steps.

    Args:
        steps: Such as `F0`, `I1` or `W`.
        stages: The rank's stages, its chunk 0 first.
        num_microbatches: Steps of later microbatches are left out, so an order for many
            microbatches is also one for few.

    Example:
        >>> print(*numbered(["F0", "F1", "I1", "I0", "W", "W"], [0, 3], 1))
        0F0 3F0 3I0 0I0 3W0 0W0
    """
    counts: Counter[tuple[int, bool]] = Counter()
    pending: deque[Action] = deque()
    actions = []
    for step in steps:
        if step == Op.W:
            actions.append(pending.popleft())
            continue
        op, chunk = Op(step[0]), int(step[1:])
        counted = chunk, op is Op.F
        action = Action(stages[chunk], op, counts[counted])
        counts[counted] += 1
        actions.append(action)
        if op is Op.I:
            pending.append(action._replace(op=Op.W))
    return tuple(action for action in actions if action.microbatch < num_microbatches)


def v_orders(
    steps: Callable[[int, int, int], Iterable[str]],
    num_ranks: int,
    num_microbatches: int,
    *,
    least: int,
) -> Orders:
    """Return the orders of two chunks a rank in a V.

    Args:
        steps: (rank, ranks, microbatches) -> steps of the rank.
        num_ranks: Ranks.
        num_microbatches: Microbatches of one step.
        least: Fewest microbatches that `steps` exists for; of fewer, those steps are
            taken without the others.
    """
    enough = max(num_microbatches, least)
    return tuple(
        numbered(
            steps(rank, num_ranks, enough),
            v_stages(rank, num_ranks, 2),
            num_microbatches,
        )
        for rank in range(num_ranks)
    )


def v_stages(rank: int, num_ranks: int, _: int) -> tuple[int, int]:
    """Return the stages of a rank if chunk 0 goes down the ranks and chunk 1 back up.

    Example:
        >>> [v_stages(rank, 3, 2) for rank in range(3)]
        [(0, 5), (1, 4), (2, 3)]
    """
    return rank, 2 * num_ranks - 1 - rank
