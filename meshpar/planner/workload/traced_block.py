"""What tracing a user's own block found: a block that no size describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TracedBlock:
    """The mean block of a model; FLOPs and bytes are those of one token.

    Args:
        parameters: Of one block.
        linear_flops: Forward, of matmuls with weights.
        mixing_flops: Forward, of matmuls between activations, such as attention's.
        seq: Tokens of the sequence that was traced: mixing grows with it.
        residual_bytes: What the backward needs, by remat policy, of one token.
        residual_dtype_bytes: Of one value in that trace.
        other_end_parameters: Outside the blocks, beside embedding and head.
    """

    parameters: int
    linear_flops: float
    mixing_flops: float
    seq: int
    residual_bytes: Mapping[str, float]
    residual_dtype_bytes: int
    other_end_parameters: int
