"""How a training program runs a layout: what it fuses, overlaps, shares and keeps.

A property of the software, the same for all its runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshpar.errors import InputError, nearest
from meshpar.hardware.attention_kernels import KERNELS, OWN_KERNEL
from meshpar.hardware.device import is_number


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One training program.

    Args:
        name: What `--execution` calls it.
        fused_attention: Whether one kernel does attention without storing the scores,
            and skips what a causal mask hides (FlashAttention), where there is one:
            `Run.attention`.
        attention_kernel: Which one: a name of `meshpar.hardware.attention_kernels`, or
            `own` for what this library takes on the device.
        fused_activation: Whether one kernel does the MLP's bias, activation and gate.
        dropout: Whether blocks drop values, whose masks are kept.
        lock_step: Whether all pipeline ranks move together, tick by tick, those without
            work too (`meshpar.parallel.pipeline`); otherwise each waits for its inputs.
        shared_ends: Whether all pipeline ranks share embedding and head; otherwise the
            first has the embedding and the last the head.
        tensor_overlap: Whether the backward's collectives over `tensor` run beside the
            matmuls for the weight gradients.
        tensor_ring: Whether they, and the forward's, run in chunks around a ring, each
            beside the matmul of another chunk.
        reduction_overlap: Whether gradients are reduced beside the last backward.
        update_overlap: Whether updated parameters are gathered beside the next forward.
        gather_overlap: Whether weights split over `fsdp` are gathered one layer ahead.
        gathers_again: Whether they are gathered once more for what a block recomputes.
        measured_overlap: Whether what is hidden inside of a step is what compiled
            programs hide (`meshpar.planner.machine.overlap`), not a yes or no of these.
        rails: Network ports of a host that one collective uses at once; 0 for all.
        hop_overlap: Whether activations hop between stages beside computation.
        hop_split: Whether a hop is split over `tensor` and gathered behind it.
        fused_accumulation: Whether a weight gradient is added to its sum by the matmul
            that makes it.
        keeps_gathered: Whether what sequence parallelism gathers is kept for the
            backward; otherwise it is gathered again.
        weight_bytes: Of each parameter as it is stored for use.
        gradient_bytes: Of each parameter's gradient sum.
        bucket_copy_bytes: Of each parameter, copies of its gradient in the buckets that
            collectives sum.
        reduction_bytes: Of each parameter in the reduction over `data`.
        state_bytes: Of each parameter's optimizer state, and its master if it has one.
        logit_bytes: Of each logit at the loss, all its copies together: fp32 logits and
            their gradient (8); in Megatron-LM and nanotron 16-bit logits, the fp32
            copy, its softmax, and a 16-bit gradient (12).
        launch_s: Of each kernel of a forward, what its launch takes from Python besides
            what the device takes (`Efficiency.launch_s`).
        host_s: Work of the host between steps that no device work hides.
        hop_wait_s: Of each hop between stages, besides its bytes: what the host takes
            to wait for it and to start the device again.
        bucket_bytes: Of the gradients that one collective over data-parallel devices
            sums, and of the parameters that one gathers behind an update; 0 for all.
        reserve: Bytes that the allocator holds besides what is counted, as a fraction
            of that: rounding, fragments, temporaries of library calls.
        eager: Whether operations run one by one, as written; otherwise a compiler
            fuses them, casts parameters for use, and leaves out what no result needs.

    Raises:
        InputError: A value of another type, or outside of what it can be.
    """

    name: str
    fused_attention: bool
    fused_activation: bool
    dropout: bool
    lock_step: bool
    shared_ends: bool
    tensor_overlap: bool
    reduction_overlap: bool
    gather_overlap: bool
    hop_overlap: bool
    hop_split: bool
    fused_accumulation: bool
    keeps_gathered: bool
    weight_bytes: int
    gradient_bytes: int
    reduction_bytes: int
    state_bytes: int
    logit_bytes: float
    host_s: float
    eager: bool
    launch_s: float = 0.0
    attention_kernel: str = "cudnn"
    tensor_ring: bool = False
    update_overlap: bool = False
    gathers_again: bool = False
    measured_overlap: bool = False
    rails: int = 0
    hop_wait_s: float = 0.0
    bucket_bytes: float = 0.0
    bucket_copy_bytes: int = 0
    reserve: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(self.name, field.name, str(field.type), getattr(self, field.name))

    @property
    def update_bytes(self) -> int:
        """Of each parameter, what the update reads and writes.

        The sum's norm reads it, Adam reads it and reads and writes its state. Compiled,
        the parameter is read and written. Operation by operation, clipping reads and
        writes the sum, the master is read to write the parameter, and the sum is set to
        zero; one of 16 bits is first copied to fp32.
        """
        adam = 2 * 4 + 2 * self.state_bytes
        if not self.eager:
            return adam + 2 * self.weight_bytes
        copied = 2 + 4 if self.gradient_bytes == 2 else 0
        return adam + 2 * 4 + 4 + self.weight_bytes + self.gradient_bytes + copied


# Least and most of each number: beyond any program that is known.
_RANGES = {
    "weight_bytes": (1, 8),
    "gradient_bytes": (0, 8),
    "bucket_copy_bytes": (0, 8),
    "reduction_bytes": (0, 8),
    "state_bytes": (0, 32),
    "logit_bytes": (0, 64),
    "host_s": (0, 3600),
    "launch_s": (0, 1),
    "hop_wait_s": (0, 1),
    "bucket_bytes": (0, math.inf),
    "reserve": (0, 1),
    "rails": (0, 72),
}
_KINDS = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text, in quotes"),
    "int": (
        lambda value: is_number(value) and float(value).is_integer(),
        "a whole number",
    ),
    "float": (is_number, "a number"),
}


def _check(name: object, field: str, kind: str, value: object) -> None:
    is_kind, words = _KINDS[kind]
    if not is_kind(value):
        raise InputError(
            f"execution {name!r}: {field}={value!r} must be {words}",
            key="plan.wrong_field_type",
        )
    kernels = (*KERNELS, OWN_KERNEL)
    if field == "attention_kernel" and value not in kernels:
        raise InputError(
            f"execution {name!r}: no attention_kernel {value!r}; "
            f"{nearest(str(value), kernels)}",
            key="plan.unknown_attention_kernel",
        )
    if field in _RANGES:
        least, most = _RANGES[field]
        if not least <= value <= most:  # type: ignore[operator]
            raise InputError(
                f"execution {name!r}: {field}={value!r} must be at least {least} and "
                f"at most {most}",
                key="plan.field_out_of_range",
            )
