"""Bytes per device: parameters, gradients, optimizer, activations, and the rest."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshpar.planner.activations import everything_bytes, kept_bytes
from meshpar.planner.block_time import block_parameters
from meshpar.planner.pipeline_time import in_flight, lock_step
from meshpar.planner.run import Run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank's devices.

    Args:
        parameter_bytes: Parameters as stored for use.
        gradient_bytes: Gradients summed over microbatches, and copies of them.
        optimizer_bytes: Masters and the optimizer's state.
        activation_bytes: What forwards keep for their backwards.
        boundary_bytes: Of them, what arrives from other stages.
        logit_bytes: Logits and their gradient, at the loss.
        late_bytes: Of the gradients, what does not exist yet at the loss.
        gathered_bytes: Parameters gathered for use.
        workspace_bytes: What one block needs beside, in its backward.
        stage: The rank that this is.
        in_flight: Microbatches that it holds.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    boundary_bytes: float
    logit_bytes: float
    late_bytes: float
    gathered_bytes: float
    workspace_bytes: float
    stage: int
    in_flight: float

    @property
    def other_bytes(self) -> float:
        """Gathered parameters, and logits or workspace: they are not there at once."""
        at_loss = self.logit_bytes - self.late_bytes
        return self.gathered_bytes + max(at_loss, self.workspace_bytes)

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.other_bytes
        )

    def as_json(self) -> dict[str, float]:
        """The parts and their sums."""
        parts = {name: round(value) for name, value in asdict(self).items()}
        return {
            **parts,
            "other_bytes": round(self.other_bytes),
            "total_bytes": round(self.total_bytes),
        }


def memory_of(run: Run) -> Memory:
    """The memory of the rank that needs most."""
    return max(rank_memories(run), key=lambda memory: memory.total_bytes)


def rank_memories(run: Run) -> list[Memory]:
    """The memory of every rank of `stage`."""
    layout = run.layout
    count = lock_step if run.execution.lock_step else in_flight
    held = count(layout.schedule, layout.stage, layout.microbatches, layout.chunks)
    chunks_held = held.in_flight if run.execution.lock_step else held
    return [_rank(run, rank, chunks) for rank, chunks in enumerate(chunks_held)]


def _rank(run: Run, rank: int, chunks_held: int) -> Memory:
    execution, layout = run.execution, run.layout
    parameters = rank_parameters(run, rank)
    shares = {
        name: 1 / layout.fsdp if layout.zero >= level else 1.0
        for name, level in (("state", 1), ("gradient", 2), ("weight", 3))
    }
    in_flight = chunks_held / layout.chunks
    layers = [layer for chunk in run.blocks_of_rank(rank) for layer in chunk]
    kept = sum(kept_bytes(run, moe=run.workload.is_moe(layer)) for layer in layers)
    boundary = _boundary_bytes(run)
    has_head = execution.shared_ends or rank == layout.stage - 1
    gradients = parameters * execution.gradient_bytes * shares["gradient"]
    once = not execution.eager and not is_pipelined(run)
    return Memory(
        parameter_bytes=parameters * execution.weight_bytes * shares["weight"],
        gradient_bytes=gradients,
        optimizer_bytes=parameters * execution.state_bytes * shares["state"],
        activation_bytes=kept * in_flight + boundary,
        boundary_bytes=boundary,
        logit_bytes=_logit_bytes(run) if has_head else 0.0,
        late_bytes=gradients if once else 0.0,
        gathered_bytes=_gathered_bytes(run, rank),
        workspace_bytes=_workspace_bytes(run, rank, layers, kept),
        stage=rank,
        in_flight=in_flight,
    )


def is_pipelined(run: Run) -> bool:
    """Whether a step runs in ticks: it has stages, or microbatches to accumulate."""
    return run.layout.stage > 1 or run.layout.microbatches > 1


def rank_parameters(run: Run, rank: int) -> float:
    """Parameters of one rank's devices, split over `tensor` and `expert` alone."""
    layers = [layer for chunk in run.blocks_of_rank(rank) for layer in chunk]
    blocks = sum(
        block_parameters(run, moe=run.workload.is_moe(layer)) for layer in layers
    )
    return blocks + end_parameters(run, rank)


def routed_parameters(run: Run, rank: int) -> float:
    """Those of them that belong to this device's experts."""
    workload, layout = run.workload, run.layout
    layers = [layer for chunk in run.blocks_of_rank(rank) for layer in chunk]
    routed = sum(
        workload.expert_parameters(moe=workload.is_moe(layer)) for layer in layers
    )
    return routed / layout.expert / layout.tensor


def end_parameters(run: Run, rank: int) -> float:
    """Of embedding and head, as far as this rank has them."""
    workload, last = run.workload, rank == run.layout.stage - 1
    shared, tensor = run.execution.shared_ends, run.layout.tensor
    total = 0.0
    if shared or rank == 0:
        total += workload.embedding_parameters / tensor
    if shared or last:
        total += workload.head_parameters / tensor + workload.final_norm_parameters
    if last and not shared and workload.tied and run.layout.stage > 1:
        total += workload.vocab * workload.hidden / tensor  # its own copy
    return total


def _boundary_bytes(run: Run) -> float:
    """Buffers between stages: an activation and a gradient that arrive."""
    if run.layout.stage == 1:
        return 0.0
    return 2 * run.residual_bytes * run.residual_share


def _logit_bytes(run: Run) -> float:
    tokens = run.tokens
    if run.execution.shared_ends:
        tokens /= run.layout.stage
    return tokens * run.workload.vocab / run.layout.tensor * run.execution.logit_bytes


def _gathered_bytes(run: Run, rank: int) -> float:
    """Whole parameters in use: the ends', one layer's and the next one's."""
    layout = run.layout
    cast = not run.execution.eager and layout.precision == "bf16"
    if not cast and (layout.fsdp == 1 or layout.zero < 3):
        return 0.0
    moe = run.workload.is_moe(run.workload.layers)
    layers = 2 * block_parameters(run, moe=moe)
    return (layers + end_parameters(run, rank)) * run.dtype_bytes


def _workspace_bytes(run: Run, rank: int, layers: list[int], kept: float) -> float:
    """One block's own residuals where the backward computes them again, and copies."""
    moe = bool(layers) and run.workload.is_moe(layers[-1])
    again = everything_bytes(run, moe=moe)
    if run.execution.eager:
        return again if run.layout.remat == "full" else 0.0
    if run.layout.remat == "none":
        again = 0.0
    ends = end_parameters(run, rank) * run.execution.gradient_bytes
    if not is_pipelined(run):
        # A tied table's gradient is whole from the head's part to the embedding's.
        whole = run.workload.tied and run.layout.fsdp > 1
        return again + (ends if whole else 0.0)
    # What a tick's forward keeps before it has its slot; the ends' gradients, whole in
    # their sums; of this tick's head and of its embedding a table each.
    sums = ends * (1 - 1 / run.layout.fsdp) if run.layout.zero >= 2 else 0.0
    table = run.workload.vocab * run.workload.hidden / run.layout.tensor
    ticks = 2 * table * run.execution.gradient_bytes
    return again + kept / run.layout.chunks + sums + ticks
