"""Everything that a layout must meet, one row each.

A row has the stable key of its error, the option of the layout that it is about, when
it is broken, and the words of the error. Lint, the training step, the planner, the
fuzzer and the command line read these rows, so that one fault has one key and one
wording. Each gives the facts that it knows; a row whose facts are missing refuses
nothing. What depends on a model's rules is in `meshpar.train.refusals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpar.errors import InputError, RuleError
from meshpar.hardware.platforms import platform_named
from meshpar.layout.layout import STAGE_REMATS, Layout, ResidualNames

PLAIN = Layout()
"""The layout with every option at its default."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A layout, and what is known of the run that it is for.

    Args:
        layout: The layout, every mesh axis with its size.
        platform: `cpu`, `gpu` or `tpu`; None if not known, as for all that follows.
        examples: Examples of the batch.
        array: Name of the array that has them; empty for a whole batch.
        seq: Tokens of an example.
        model: Name of the model in messages.
        num_experts: Experts of a block; 0 if the model has none.
        input_gradient: Name of an input that has a gradient; empty if none has.
        sizes: Name -> a size that `tensor` splits.
        kv_heads: Heads of keys and values, several of which may share a device.
        heads: Heads of attention, of all devices of `tensor`.
        heads_in: Name of the parameter that has the heads.
        head_shards: Devices that share the heads, but for those of `context`.
        stored: Name -> a size that the mesh axes of ZeRO split.
    """

    layout: Layout
    platform: str | None = None
    examples: int | None = None
    array: str = ""
    seq: int | None = None
    model: str = "the model"
    num_experts: int | None = None
    input_gradient: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    kv_heads: int | None = None
    heads: int | None = None
    heads_in: str = "the model"
    head_shards: int = 1
    stored: Mapping[str, int] = field(default_factory=dict)


class Requirement(NamedTuple):
    """One rule that a layout must meet.

    Args:
        key: Stable key of the error.
        option: Option of the layout that the error is about.
        is_broken: Return True if the facts break the rule.
        words: Return what is wrong, with both numbers, and a way out.
        kind: Lint's word for the error, if it is a `RuleError`.
    """

    key: str
    option: str
    is_broken: Callable[[Facts], bool]
    words: Callable[[Facts], str]
    kind: str = ""


class Problem(NamedTuple):
    """A requirement that a layout does not meet.

    Args:
        option: Option of the layout whose value must change.
        message: What was asked, what was found, and a way out.
        key: Stable key of the error.
        kind: Lint's word for it, if it is a `RuleError`.
    """

    option: str
    message: str
    key: str
    kind: str = ""

    def error(self, layout: Layout | None = None) -> InputError:
        """Return the error to raise; its message names the layout if one is given."""
        named = "" if layout is None else f"layout {str(layout)!r}: "
        if self.kind:
            return RuleError(self.kind, named + self.message, key=self.key)
        return InputError(named + self.message, key=self.key)


def _zero_shards(layout: Layout) -> int:
    """Return the devices that may share out stored parameters."""
    axes = {"data", "fsdp", *layout.zero_axes}
    return math.prod(layout.mesh_shape[axis] for axis in axes)


def _zero_axes_idle(layout: Layout) -> str:
    """Return why `zero_axes` changes nothing, such as `data=1`; empty if it does."""
    if not layout.zero_axes or layout.zero == 0:
        return "zero=0" if layout.zero_axes else ""
    idle = [axis for axis in layout.zero_axes if layout.mesh_shape[axis] == 1]
    return f"{idle[0]}=1" if idle else ""


def _residuals(layout: Layout) -> ResidualNames:
    """Return the residuals that `remat` names, none if it is one word."""
    return layout.residual_names or ResidualNames()


def _without_axis(option: str, mesh_axis: str) -> Requirement:
    """Return the row of an option that means something on one mesh axis only."""
    return Requirement(
        "layout.option_without_axis",
        option,
        lambda at: (
            getattr(at.layout, option) != getattr(PLAIN, option)
            and getattr(at.layout, mesh_axis) == 1
        ),
        lambda at: (
            f"{option} changes nothing while {mesh_axis}=1; leave it out, or give "
            f"{mesh_axis!r} a size"
        ),
    )


LOCAL_STEPS = (
    Requirement(
        "layout.sync_of_one_replica",
        "sync_every",
        lambda at: at.layout.sync_every > 1 and at.layout.data == 1,
        lambda at: (
            f"sync_every={at.layout.sync_every} averages replicas over 'data', but "
            "data=1 has only one; leave it out, or give 'data' a size"
        ),
    ),
    Requirement(
        "layout.sync_with_shared_states",
        "sync_every",
        lambda at: (
            at.layout.sync_every > 1
            and at.layout.zero > 0
            and "data" in at.layout.split_axes
        ),
        lambda at: (
            f"sync_every={at.layout.sync_every} gives each part of 'data' a replica "
            f"with optimizer state of its own, but zero={at.layout.zero} shares states "
            "out over 'data'; share them over 'fsdp' (zero_axes=fsdp), or set "
            "sync_every=1"
        ),
    ),
    Requirement(
        "layout.sync_with_host_memory",
        "sync_every",
        lambda at: at.layout.sync_every > 1 and at.layout.optimizer_memory == "host",
        lambda at: (
            f"sync_every={at.layout.sync_every} is not supported with "
            "optimizer_memory=host; leave one of them out"
        ),
    ),
)
"""Requirements of local steps."""

OPTIONS = (
    _without_axis("schedule", "stage"),
    _without_axis("chunks", "stage"),
    _without_axis("splits", "stage"),
    _without_axis("attention", "context"),
    Requirement(
        "layout.stage_remat_without_stages",
        "remat",
        lambda at: at.layout.remat in STAGE_REMATS and at.layout.stage == 1,
        lambda at: (
            f"remat={at.layout.remat} keeps the input of each pipeline stage, but "
            "stage=1; take remat=full, or give 'stage' a size"
        ),
    ),
    Requirement(
        "layout.offload_in_ticks",
        "remat",
        lambda at: bool(_residuals(at.layout).offload) and at.layout.runs_in_ticks,
        lambda at: (
            "remat=offload is not supported where microbatches wait in slots on the "
            "device; write remat=save:..., or set stage=1 and microbatches=1"
        ),
    ),
    Requirement(
        "layout.zero_without_effect",
        "zero",
        lambda at: (
            at.layout.zero in (1, 2)
            and at.layout.data * at.layout.fsdp == 1
            and not at.layout.zero_axes
        ),
        lambda at: (
            f"zero={at.layout.zero} shares nothing out while data=1 and fsdp=1; leave "
            "it out, or give one of them a size"
        ),
    ),
    Requirement(
        "layout.zero_axes_without_effect",
        "zero_axes",
        lambda at: bool(_zero_axes_idle(at.layout)),
        lambda at: (
            f"zero_axes={'/'.join(at.layout.zero_axes)} changes nothing while "
            f"{_zero_axes_idle(at.layout)}; leave it out"
        ),
    ),
    Requirement(
        "layout.fsdp_gather_without_effect",
        "fsdp_gather",
        lambda at: (
            at.layout.fsdp_gather != PLAIN.fsdp_gather
            and not (
                at.layout.zero == 3
                and at.layout.runs_in_ticks
                and _zero_shards(at.layout) > 1
            )
        ),
        lambda at: (
            f"fsdp_gather={at.layout.fsdp_gather} changes nothing without zero=3, a "
            "size for 'fsdp', and stages or microbatches; leave it out"
        ),
    ),
    Requirement(
        "layout.fsdp_prefetch_without_effect",
        "fsdp_prefetch",
        lambda at: (
            at.layout.fsdp_prefetch != PLAIN.fsdp_prefetch
            and not (
                at.layout.zero >= 2
                and not at.layout.runs_in_ticks
                and _zero_shards(at.layout) > 1
            )
        ),
        lambda at: (
            f"fsdp_prefetch={at.layout.fsdp_prefetch} changes nothing with stages or "
            "microbatches, nor without zero=2 or 3 and a size for 'fsdp' or 'data'; "
            "leave it out"
        ),
    ),
    Requirement(
        "layout.param_dtype_rounds",
        "param_dtype",
        lambda at: at.layout.param_dtype != "fp32" and at.layout.precision == "fp32",
        lambda at: (
            f"param_dtype={at.layout.param_dtype} rounds parameters that "
            "precision=fp32 computes with; set precision=bf16, or leave it out"
        ),
    ),
    *LOCAL_STEPS,
)
"""Requirements of a layout alone."""

PLATFORM = (
    Requirement(
        "layout.offload_on_cpu",
        "remat",
        lambda at: (
            at.platform is not None
            and platform_named(at.platform).is_host
            and bool(_residuals(at.layout).offload)
        ),
        lambda at: (
            "a CPU's memory is the host's own, so remat=offload would move nothing; "
            f"write remat=save:{'/'.join(_residuals(at.layout).every)}"
        ),
    ),
)
"""Requirements of the devices that a layout runs on."""


def _batch_words(at: Facts) -> str:
    layout, expert = at.layout, at.layout.expert
    return (
        f"{f'batch[{at.array!r}]' if at.array else 'the batch'} has {at.examples} "
        f"examples, which do not divide over {layout.batch_shards} devices of data="
        f"{layout.data},fsdp={layout.fsdp}{f',expert={expert}' if expert > 1 else ''}"
        + (f" x microbatches={layout.microbatches}" * (layout.microbatches > 1))
        + "; pad with examples of weight 0, or change the global batch"
    )


BATCH = (
    Requirement(
        "batch.indivisible",
        "microbatches",
        lambda at: (
            at.examples is not None
            and at.examples % (at.layout.batch_shards * at.layout.microbatches) > 0
        ),
        _batch_words,
    ),
)
"""Requirements of the batch."""

EXPERTS = (
    Requirement(
        "layout.expert_without_experts",
        "expert",
        lambda at: at.layout.expert > 1 and at.num_experts == 0,
        lambda at: (
            f"expert={at.layout.expert} splits experts, but {at.model} has no "
            "parameter with the logical axis 'experts'; set expert=1, and give 'data' "
            "or 'fsdp' its devices"
        ),
        "dead",
    ),
    Requirement(
        "layout.indivisible",
        "expert",
        lambda at: (at.num_experts or 0) % at.layout.expert > 0,
        lambda at: (
            f"experts={at.num_experts} do not divide over expert={at.layout.expert}; "
            "choose a divisor"
        ),
    ),
)
"""Requirements of routed experts."""

INPUTS = (
    Requirement(
        "layout.unsupported_input_gradient",
        "inputs",
        lambda at: (
            bool(at.input_gradient)
            and (at.layout.sync_every > 1 or at.layout.context > 1)
        ),
        lambda at: (
            f"the gradient of input {at.input_gradient!r} is found once a step and for "
            f"whole sequences, but sync_every={at.layout.sync_every} and "
            f"context={at.layout.context}; leave sync_every and context out"
        ),
    ),
)
"""Requirements of a model's inputs."""


def _indivisible(sizes: Mapping[str, int], degree: int) -> str:
    """Return the first size that does not divide, as `name=size`; empty if none."""
    return next((f"{name}={size}" for name, size in sizes.items() if size % degree), "")


def _state_shards(layout: Layout) -> int:
    """Return the devices that ZeRO shares states out over."""
    return math.prod(layout.mesh_shape[axis] for axis in layout.split_axes)


def _heads_words(at: Facts) -> str:
    trading, context = at.layout.attention_method.heads, at.layout.context
    return (
        f"attention={at.layout.attention} splits heads over "
        f"{'context=' if trading == context else ''}{trading}"
        f"{f' x {at.head_shards}' if at.head_shards > 1 else ''}, which does not "
        f"divide the {at.heads} of {at.heads_in}; take attention=ring or allgather, or "
        "another context"
    )


ATTENTION = (
    Requirement(
        "attention.indivisible_heads",
        "attention",
        lambda at: (
            at.heads is not None
            and at.heads % (at.head_shards * at.layout.attention_method.heads) > 0
        ),
        _heads_words,
    ),
)
"""Requirements of attention across `context`."""

SIZES = (
    Requirement(
        "layout.indivisible",
        "tensor",
        lambda at: bool(_indivisible(at.sizes, at.layout.tensor)),
        lambda at: (
            f"{_indivisible(at.sizes, at.layout.tensor)} does not divide over "
            f"tensor={at.layout.tensor}; choose a divisor"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "tensor",
        lambda at: (
            at.kv_heads is not None
            and at.kv_heads % at.layout.tensor > 0
            and at.layout.tensor % at.kv_heads > 0
        ),
        lambda at: (
            f"kv_heads={at.kv_heads} and tensor={at.layout.tensor} do not divide one "
            "another; choose a divisor or a multiple"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "sequence_parallel",
        lambda at: (
            at.layout.sequence_parallel
            and at.seq is not None
            and at.seq % (at.layout.tensor * at.layout.context) > 0
        ),
        lambda at: (
            f"{at.seq} tokens do not divide over tensor={at.layout.tensor} x context="
            f"{at.layout.context}; change the sequence, or leave sequence_parallel out"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "context",
        lambda at: at.seq is not None and at.seq % at.layout.context > 0,
        lambda at: (
            f"{at.seq} tokens do not divide over context={at.layout.context}; change "
            "the sequence, or choose a divisor"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "zero",
        lambda at: bool(_indivisible(at.stored, _state_shards(at.layout))),
        lambda at: (
            f"{_indivisible(at.stored, _state_shards(at.layout))} does not divide over "
            f"the {_state_shards(at.layout)} devices of "
            f"{' x '.join(at.layout.split_axes)}; choose a divisor"
        ),
    ),
)
"""Requirements of a transformer's sizes, which the planner knows before a model is."""


REQUIREMENTS = (*OPTIONS, *PLATFORM, *BATCH, *SIZES, *ATTENTION, *EXPERTS, *INPUTS)
"""All rows, in the order in which they are reported."""


def problems(
    facts: Facts, rows: Iterable[Requirement] = REQUIREMENTS
) -> Iterator[Problem]:
    """Yield the rows that the facts break, the first of each option."""
    reported = set()
    for row in rows:
        if row.option not in reported and row.is_broken(facts):
            reported.add(row.option)
            yield Problem(row.option, row.words(facts), row.key, row.kind)


def layout_errors(layout: Layout) -> dict[str, InputError]:
    """Return the errors of a layout that no training step takes, by its option."""
    found = problems(Facts(layout=layout), OPTIONS)
    return {one.option: one.error(layout) for one in found}
