"""Parameters that one device has, and the bytes of each at rest and in the update."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.planner.cost.run import Run


def block_parameters(run: Run, *, moe: bool) -> float:
    """Return the number of parameters of a block that one device computes with."""
    workload, layout = run.workload, run.layout
    experts = workload.expert_parameters(moe=moe)
    matrices = workload.block_matrix_parameters(moe=moe) - experts
    vectors = workload.block_vector_parameters(moe=moe)
    return (matrices + experts / layout.expert) / layout.tensor + vectors


def rank_parameters(run: Run, rank: int) -> float:
    """Return a rank's parameters on one device, without ZeRO's split."""
    blocks = sum(
        count * block_parameters(run, moe=moe)
        for moe, count in blocks_by_kind(run, rank)
    )
    return blocks + end_parameters(run, rank)


def blocks_by_kind(run: Run, rank: int) -> Iterator[tuple[bool, int]]:
    """Return pairs of True for routed experts, and the count of such blocks."""
    chunks = run.blocks_of_rank(rank)
    total = sum(map(len, chunks))
    moe = sum(map(run.workload.count_moe_layers, chunks))
    return (
        (kind, count) for kind, count in ((False, total - moe), (True, moe)) if count
    )


def routed_parameters(run: Run, rank: int) -> float:
    """Return a rank's parameters on one device that belong to its routed experts."""
    workload, layout = run.workload, run.layout
    routed = sum(
        count * workload.expert_parameters(moe=moe)
        for moe, count in blocks_by_kind(run, rank)
    )
    return routed / layout.expert / layout.tensor


def shared_out(run: Run, rank: int) -> float:
    """Return one device's share of a rank's parameters, as ZeRO splits them.

    Those of experts lie over `expert` already.
    """
    routed = routed_parameters(run, rank)
    others = rank_parameters(run, rank) - routed
    return others / run.state_shards + routed / run.routed_shards


def end_parameters(run: Run, rank: int) -> float:
    """Return the parameters of embedding and head that a rank's device has."""
    workload, tensor = run.workload, run.layout.tensor
    first, last = has_ends(run, rank)
    total = 0.0
    if first:
        total += workload.embedding_parameters / tensor
    if last:
        total += workload.head_parameters / tensor + workload.final_norm_parameters
    if last and not first and workload.tied:
        total += table_parameters(run)  # its own copy
    return total


def table_parameters(run: Run) -> float:
    """Return one device's parameters of the table of tokens, or of the head's."""
    return run.workload.vocab * run.workload.hidden / run.layout.tensor


def has_ends(run: Run, rank: int) -> tuple[bool, bool]:
    """Return True for the embedding, and for the head, if a rank has it."""
    if run.execution.shared_ends:
        return True, True
    stages = run.stages_of_rank(rank)
    return 0 in stages, run.num_stages - 1 in stages


def stored_bytes(run: Run) -> tuple[int, int]:
    """Return the bytes of a parameter at rest, and of its optimizer state.

    Our parameters of 16 bits have an fp32 master among their state, unless they are
    rounded at random.
    """
    execution, kind = run.execution, run.layout.param_dtype
    if execution.eager or kind == "fp32":
        return execution.weight_bytes, execution.state_bytes
    master = 4 if kind == "bf16" else 0
    return 2, execution.state_bytes + master


def outer_bytes(run: Run) -> int:
    """Return the bytes a parameter that local steps keep: the common one, a momentum.

    In fp32, laid out as the optimizer's state.
    """
    return 8 if run.layout.sync_every > 1 else 0


def update_bytes(run: Run) -> int:
    """Return the bytes a parameter that the update reads and writes, as it is stored.

    A master is among the state, and its parameter only written; one that is rounded at
    random is read too.
    """
    execution = run.execution
    weight_bytes, state_bytes = stored_bytes(run)
    more = 2 * (state_bytes - execution.state_bytes)
    if execution.eager or run.layout.param_dtype == "fp32":
        return execution.update_bytes
    ways = 1 if state_bytes > execution.state_bytes else 2
    return execution.update_bytes + more + ways * weight_bytes - 8
