"""Whether a step's blocks prefetch (`meshpar.parallel.prefetch`), and why not."""

from __future__ import annotations

import jax

from meshpar.parallel.placement import Placement
from meshpar.parallel.zero import gradient_in_loop, in_loop


def prefetches(placement: Placement) -> bool:
    """Whether the blocks prefetch, and have something to communicate."""
    choice = placement.layout.fsdp_prefetch
    if placement.layout.runs_in_ticks or choice == "off":
        return False
    return (choice == "on" or placement.platform != "cpu") and _communicates(placement)


def prefetch_notes(placement: Placement) -> tuple[str, ...]:
    """What is left undone of it by the layout's defaults, a line each."""
    if not _communicates(placement) or placement.layout.fsdp_prefetch == "off":
        return ()
    if placement.layout.runs_in_ticks:
        return (
            "fsdp_prefetch: not where a step runs in ticks (stages or microbatches); "
            "each block's parameters are gathered when it begins",
        )
    if not prefetches(placement):
        return (
            "fsdp_prefetch: not on cpu, whose compiler starts no collective ahead; "
            "fsdp_prefetch=on takes the loop of GPUs and TPUs",
        )
    if any(group.enter for group in placement.model.groups):
        return (
            "fsdp_prefetch: all parameters outside the blocks are gathered before the "
            "first block, because a later group of blocks has an `enter`",
        )
    return ()


def _communicates(placement: Placement) -> bool:
    """Whether a block's parameters or gradients cross batch axes in the loop."""
    blocks = placement.model.split(placement.stored)[1]
    return any(in_loop(one) or gradient_in_loop(one) for one in jax.tree.leaves(blocks))
