"""Recomputation in a block's backward under a remat policy, for time and bytes.

A residual that is kept, or comes back from the host, is not recomputed, nor is what
only it needs. Two arrays have no name: the softmax inside of attention, and the
residual stream between the two halves, which takes attention's output, summed over
`tensor`.
"""

from __future__ import annotations

from typing import NamedTuple

from meshpar.planner.cost.run import Run
from meshpar.planner.workload.activations import OF_MATMULS

# Kernels of one forward of a block (24 in Megatron-LM's layer): four matmuls with
# weights; of attention two matmuls, softmax, dropout and a transposition; the rest.
_ATTENTION_KERNELS, _ELEMENTWISE_KERNELS = 5, 15


class Again(NamedTuple):
    """Times that one backward of a block repeats each part of its forward.

    Args:
        qkv, out, up, down: The matmuls with weights, in order.
        attention: Scores to mixed values, with the traffic over `context`.
        elementwise: Norms, positions, activation.
        sums: Sums of the residual stream over `tensor`.
        gathers: Gathers of its sequence before a matmul.
        exchanges: Tokens to their experts and back.
    """

    qkv: int = 0
    attention: int = 0
    out: int = 0
    up: int = 0
    down: int = 0
    elementwise: int = 0
    sums: int = 0
    gathers: int = 0
    exchanges: int = 0

    @property
    def kernels(self) -> int:
        """Number of kernels launched for them."""
        matmuls = self.qkv + self.out + self.up + self.down
        attention = _ATTENTION_KERNELS * self.attention
        return matmuls + attention + _ELEMENTWISE_KERNELS * self.elementwise


_WHOLE = Again(*(1,) * 5, elementwise=1, sums=2, gathers=2, exchanges=1)


def recomputation(run: Run, *, moe: bool) -> Again:
    """Return what the layout's remat repeats, as counted in compiled programs."""
    remat, eager = run.layout.remat, run.execution.eager
    if remat == "none":
        return Again()
    if remat == "stage":
        # In a loop over the stage's blocks, which reads the output of each.
        return _WHOLE
    if remat == "full":
        return _WHOLE if eager else _named(run, (), moe)
    if remat == "stage_full":
        last = _WHOLE if eager else _named(run, (), moe)
        return Again(*map(sum, zip(_WHOLE, last, strict=True)))
    if remat == "selective" and eager:
        return Again(attention=0 if run.fused_attention else 1)
    return _named(run, kept_names(run), moe)


def kept_names(run: Run) -> tuple[str, ...]:
    """Return the names of the residuals that are kept besides the block's input."""
    names = run.layout.residual_names
    if names is not None:
        return names.every
    if run.layout.remat == "dots":
        return OF_MATMULS
    return (*NAMED, *OF_EXPERTS) if run.layout.remat == "selective" else ()


NAMED = (
    "attention_normed",
    "attention_qkv",
    "attention_mixed",
    "attention_out",
    "mlp_normed",
    "mlp_gate_up",
    "mlp_up",
    "mlp_hidden",
)
"""Residuals that blocks name with `Scope.save`; gated blocks have no `mlp_up`, others
no `mlp_gate_up`."""

OF_EXPERTS = ("experts_in", "experts_gate_up")
"""Residuals of routed experts: rows that a device received, and their first matmul.

They are made in a loop over tiles, none of whose matmuls `dots` keeps.
"""


def _named(run: Run, kept: tuple[str, ...], moe: bool) -> Again:
    """Recomputation if the residuals of these names are kept.

    No gradient needs the MLP's output, but a router's and that of a gate on it. The
    sequence is gathered for the weights' gradients anyway, which serves here too: equal
    collectives merge.
    """
    qkv, out = int("attention_qkv" not in kept), int("attention_out" not in kept)
    tiled = moe and not run.execution.eager
    wide = {"experts_gate_up"} if tiled else {"mlp_up", "mlp_gate_up"}
    up = int(not wide & set(kept))
    gated = int(run.workload.modulations > 0)
    return Again(
        qkv=qkv,
        attention=1,
        out=out,
        up=up,
        down=gated or int(moe) * up,
        elementwise=1,
        sums=out + gated,
        exchanges=int("experts_in" not in kept) if tiled else int(moe) * up,
    )
