"""A layout: how many devices each mesh axis has, and how the step runs on them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Literal

from meshpar.errors import InputError, key_values, nearest, whole_number
from meshpar.layout.context_method import CONTEXT_METHODS, ContextAttention
from meshpar.schedules import SCHEDULES, schedule_method

MESH_AXES = ("data", "fsdp", "stage", "context", "expert", "tensor")
"""All mesh axes, outermost (slowest link) first."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The mesh axes that split the batch; `expert` splits the experts besides."""

ZERO_AXES = ("data", "fsdp", "context", "expert")
"""The mesh axes that ZeRO may split stored parameters and states over; experts are
split over `expert` already, what is no expert may be."""

TOKEN_AXES = ("data", "fsdp", "context", "expert")
"""The mesh axes that split the tokens of a batch."""

MANUAL_AXES = (*BATCH_AXES, "stage", "context")
"""The mesh axes over which collectives are written out; GSPMD has the others."""

FIXED_EXECUTIONS = ("uniform", "divergent")
"""Values of `execution` that leave nothing open."""

EXECUTIONS = ("auto", *FIXED_EXECUTIONS)
"""Values of `execution`."""

STAGE_REMATS = ("stage", "stage_full")
"""Values of `remat` that keep only the input of each pipeline stage."""

REMATS = ("none", "selective", "full", "dots", *STAGE_REMATS)
"""Values of `remat` of one word."""

BY_COST: Final = "cost"
"""The value of `splits` that balances the stages by what their layers cost."""

BLOCK_INPUT = "block_input"
"""Name of the stream that a block takes, which every policy keeps: named so, it can be
moved to the host's memory."""

ATTENTION_MIXED = "attention_mixed"
"""Name of attention's output before its last matmul. Splash attention and our tiles
name the log-sum-exp of scores so too: with both kept, no backward attends again."""

_RESIDUAL_WAYS = ("save", "offload")
_RESIDUAL_FORM = (
    "write for example save:mlp_up/attention_out or save:mlp_up+offload:mlp_hidden"
)

_CHOICES = {
    "execution": EXECUTIONS,
    "zero": (0, 1, 2, 3),
    "fsdp_gather": ("step", "microbatch"),
    "fsdp_prefetch": ("auto", "on", "off"),
    "optimizer_memory": ("device", "host"),
    "sequence_parallel": (False, True),
    "attention": tuple(CONTEXT_METHODS),
    "remat": REMATS,
    "precision": ("fp32", "bf16", "fp8", "mxfp8"),
    "param_dtype": ("fp32", "bf16", "bf16_stochastic"),
}
_COUNTS = (*MESH_AXES, "microbatches", "chunks", "sync_every")

_BRIDGE = ("megatron-bridge", "megatron-bridge-overlap")

SCALING_EXECUTIONS = {
    "fp8": (
        "llm-foundry",
        "maxtext",
        "maxtext-bf16",
        "maxtext-bf16-grads",
        "maxtext-dropping",
        *_BRIDGE,
        "nemo-2024",
        "primus",
        "torch-fsdp2",
        "torch-fsdp2-compile",
    ),
    "mxfp8": _BRIDGE,
}
"""Precision with scales -> the planner's executions that train so; ours does not."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of each mesh axis and how the step runs: plain data, one line of text.

    At most one mesh axis may be -1: it absorbs the devices the others leave
    (`resolve`). What is left out has its default; printing leaves defaults out.

    Args:
        data: Replicas of the parameters; each takes a share of the batch.
        fsdp: Devices that split the batch and the stored parameters (ZeRO-3).
        stage: Pipeline stages.
        context: Devices that split the sequence.
        expert: Devices that split the experts, and the batch everywhere else.
        tensor: Devices that split each matmul.
        microbatches: Parts that one global batch runs in, one after another.
        schedule: Order of the pipeline's work, by name (`meshpar.schedules.SCHEDULES`);
            orders of one's own go to `make_train_step(..., schedule=...)`.
        chunks: Stages per rank of an interleaved schedule.
        splits: Blocks of each stage; empty is as even as possible in number, `cost`
            in what they cost (`BlockGroup.costs`, or else their matmul FLOPs).
        data_splits: Microbatches of each part of `data`, `microbatches` on average;
            empty is as many for all. `6/2` of 4 parts is six for the first two and two
            for the others.
        max_pending_w: Most weight gradients that wait on a rank where backwards are
            split, each with a stash; 0 is as many as the schedule leaves.
        execution: How the ranks of a pipeline run: "uniform", all the same instructions
            in every tick, or "divergent", each one action of its own; "auto" is the
            faster of the two by their ticks, and uniform where backwards are whole.
        zero: ZeRO stage, what the devices of a split batch share out: 0 nothing,
            1 optimizer state, 2 gradients too, 3 parameters too. With 1 and 2
            parameters are whole from a step's forward to its backward, and shared out
            between steps. With microbatches 2 reduce-scatters each one's gradients: so
            many times the traffic of 1.
        zero_axes: The mesh axes that they are shared out over. When empty: `fsdp`
            (replicas across `data`: hybrid), or for `zero` 1 and 2 with `fsdp=1`,
            `data`; and `expert`, for all parameters but the experts. `context` only
            if it is named here.
        fsdp_gather: When split parameters are gathered, where a step runs in
            microbatches: once for the `step`, one reduce-scatter at its end, or for
            each `microbatch` layer by layer, which keeps one layer whole at a time.
        fsdp_prefetch: Whether a step without stages and microbatches gathers a block's
            split parameters while the block before computes, and sums its gradients
            while the next one does, whatever `zero` is; of 3 it keeps two layers whole
            at a time. With microbatches gradients are summed so in the last one's
            backward. `auto` does the first on GPUs and TPUs and the second on GPUs
            without pipelines; CPUs start no communication ahead.
        optimizer_memory: Where optimizer state and master copy lie between updates: the
            `host`'s memory costs moving them there and back in every step.
        sequence_parallel: Split the residual stream's sequence over `tensor`.
        attention: How attention crosses `context`; `ulysses:4+ring:2` trades tokens
            for heads between 4 devices next to each other, as those of a host, and
            sends keys and values around 2 such groups.
        remat: What the backward recomputes instead of keeping: nothing, each block
            but what it named (`selective`), its matmuls (`dots`) or its input
            (`full`), or the whole stage but its input: once (`stage`), then keeping
            all of its blocks until their backward, or with each block once more
            (`stage_full`), which keeps least; or names of residuals to keep
            (`save:attention_out/mlp_up`) or to move to the host's memory
            (`offload:...`, or both: `save:...+offload:...`).
        precision: Arithmetic of the blocks, and dtype of the sums over `tensor` between
            their matmuls; norms, softmax, loss and gradients are in fp32. `fp8` and
            `mxfp8` (scales of 32 values each) are words for estimates of other
            programs (`Execution.fp8`); ours refuse them.
        param_dtype: How parameters are stored between steps; beside those of bf16 the
            optimizer state holds an fp32 master copy, which is what it updates;
            `bf16_stochastic` has no copy, and rounds updated parameters at random.
        sync_every: Steps that each part of `data` does by itself before the parts
            average their parameters (`meshpar.train.local_steps`); with 1 they average
            the gradients of every step, which is data parallel.

    Raises:
        InputError: A value outside its range or choices, or two axes of -1.

    Example:
        >>> layout = Layout.parse("data=2,fsdp=2,tensor=2,remat=full")
        >>> layout.tensor, layout.num_devices, str(layout)
        (2, 8, 'data=2,fsdp=2,tensor=2,remat=full')
        >>> str(Layout(data=-1, tensor=2).resolve(8))
        'data=4,tensor=2'
    """

    data: int = 1
    fsdp: int = 1
    stage: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    splits: tuple[int, ...] | Literal["cost"] = ()
    data_splits: tuple[int, ...] = ()
    max_pending_w: int = 0
    execution: str = "auto"
    zero: int = 3
    zero_axes: tuple[str, ...] = ()
    fsdp_gather: str = "step"
    fsdp_prefetch: str = "auto"
    optimizer_memory: str = "device"
    sequence_parallel: bool = False
    attention: str = "ring"
    remat: str = "none"
    precision: str = "fp32"
    param_dtype: str = "fp32"
    sync_every: int = 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if name == "attention" and value not in choices and isinstance(value, str):
                ContextAttention.parse(value, self.context)
            elif name != "remat" or self.residual_names is None:
                _check_choice(name, value, choices)
        if self.schedule not in tuple(SCHEDULES):
            schedule_method(self.schedule)  # Which names the nearest.
        if self.max_pending_w != 0:
            _check_count("max_pending_w", self.max_pending_w)
        for name in ("splits", "data_splits"):
            sizes = getattr(self, name)
            for size in () if (name, sizes) == ("splits", BY_COST) else sizes:
                _check_count(name, size)
        _check_zero_axes(self.zero_axes)
        open_axes = [axis for axis in MESH_AXES if getattr(self, axis) == -1]
        if len(open_axes) > 1:
            raise InputError(
                f"mesh axes {' and '.join(map(repr, open_axes))} are both -1; only one "
                "can absorb the remaining devices: give the others a size",
                key="layout.two_open_sizes",
            )

    @classmethod
    def of(cls, layout: Layout | str) -> Layout:
        """Return a layout, or parse its text.

        Raises:
            InputError: It is neither, or the text cannot be read.
        """
        if isinstance(layout, str):
            return cls.parse(layout)
        if not isinstance(layout, Layout):
            raise InputError(
                f"layout is a {type(layout).__name__}; give a meshpar.Layout, or its "
                "text such as 'data=2,tensor=4'",
                key="layout.not_a_layout",
            )
        return layout

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse the text of a layout, such as `data=2,tensor=4,remat=full`.

        Raises:
            InputError: An unknown or repeated key, or a value it cannot have.
        """
        if not isinstance(text, str):
            raise InputError(
                f"layout is a {type(text).__name__}; give its text, such as "
                "'data=2,tensor=4'",
                key="layout.not_a_layout",
            )
        values = key_values(text, noun="layout", example="data=2,tensor=4")
        for key in values:
            if key not in _DEFAULTS:
                raise InputError(
                    f"layout {text!r}: no key {key!r}; {nearest(key, _DEFAULTS)}",
                    key="layout.unknown_key",
                )
        chosen: dict[str, Any] = {
            key: _parse_value(key, value) for key, value in values.items()
        }
        return cls(**chosen)

    def __str__(self) -> str:
        parts = [
            f"{name}={_format_value(getattr(self, name))}"
            for name, default in _DEFAULTS.items()
            if getattr(self, name) != default
        ]
        return ",".join(parts) or "data=1"

    def _repr_html_(self) -> str:
        from meshpar.layout.device_grid import layout_html

        return layout_html(self)

    @property
    def scales_matmuls(self) -> bool:
        """True if the operands of blocks' matmuls have 8 bits, and scales."""
        return self.precision in SCALING_EXECUTIONS

    @property
    def is_open(self) -> bool:
        """True if the number of devices decides the size of a mesh axis (-1)."""
        return -1 in (getattr(self, axis) for axis in MESH_AXES)

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size of every mesh axis, outermost first.

        Raises:
            InputError: A mesh axis is still -1.
        """
        return self._mesh_shape.copy()

    @cached_property
    def _mesh_shape(self) -> dict[str, int]:
        shape = {axis: getattr(self, axis) for axis in MESH_AXES}
        if -1 in shape.values():
            self.check_sizes("call resolve(num_devices) first")
        return shape

    @property
    def residual_names(self) -> ResidualNames | None:
        """Residuals that `remat` names; None if it is one word."""
        return named_residuals(self.remat) if isinstance(self.remat, str) else None

    @property
    def attention_method(self) -> ContextAttention:
        """How attention crosses `context`."""
        return ContextAttention.parse(self.attention, self.context)

    @property
    def num_devices(self) -> int:
        """Devices the layout needs."""
        return math.prod(self._mesh_shape.values())

    @property
    def batch_shards(self) -> int:
        """Number of parts the batch is split into."""
        return math.prod(self._mesh_shape[axis] for axis in BATCH_AXES)

    @property
    def data_counts(self) -> tuple[int, ...]:
        """Microbatches of each part of `data`.

        Example:
            >>> Layout.parse("data=4,microbatches=4,data_splits=6/2").data_counts
            (6, 6, 2, 2)
        """
        counts = self.data_splits or (self.microbatches,)
        data = self._mesh_shape["data"]
        return tuple(count for count in counts for _ in range(data // len(counts)))

    @property
    def divergent(self) -> bool:
        """True if each rank of a pipeline does an action of its own in a tick."""
        return self.execution == "divergent"

    @property
    def runs_in_ticks(self) -> bool:
        """True if a step runs in ticks: with stages or microbatches."""
        return self.stage > 1 or self.microbatches > 1

    @property
    def updates_each_microbatch(self) -> bool:
        """True if each stage updates its weights by itself after every microbatch."""
        return SCHEDULES[self.schedule].updates_each_microbatch

    @property
    def updates_each_step(self) -> int:
        """Updates of a step's parameters: 1, or one for every microbatch."""
        return self.microbatches if self.updates_each_microbatch else 1

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The mesh axes that `zero` shares states out over; empty if it does not."""
        fsdp, expert = self._mesh_shape["fsdp"], self._mesh_shape["expert"]
        return split_axes(self.zero, self.zero_axes, fsdp=fsdp, expert=expert)

    def check_sizes(self, way_out: str = "give every mesh axis a size") -> None:
        """Refuse a mesh axis of -1, if the number of devices is unknown.

        Args:
            way_out: What the message says to do.

        Raises:
            InputError: There is one.
        """
        for axis in MESH_AXES:
            if getattr(self, axis) == -1:
                raise InputError(
                    f"layout {str(self)!r}: mesh axis {axis!r} is -1, so its size "
                    f"depends on the devices; {way_out}",
                    key="layout.open_size",
                )

    def resolve(self, num_devices: int) -> Layout:
        """Return this layout on exactly `num_devices`, its -1 resolved.

        Raises:
            InputError: The sizes do not multiply to `num_devices`.
        """
        num_devices = whole_number("num_devices", num_devices, least=0)
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if open_axes and num_devices % fixed == 0 and num_devices >= fixed:
            return replace(self, **{open_axes[0]: num_devices // fixed})
        if open_axes or fixed != num_devices:
            needs = f"a multiple of {fixed}" if open_axes else f"{fixed}"
            raise InputError(
                f"layout {str(self)!r} needs {needs} devices, but there are "
                f"{num_devices}; change the sizes or set one mesh axis to -1",
                key="layout.wrong_device_count",
            )
        return self


@dataclass(frozen=True, kw_only=True)
class ResidualNames:
    """Residuals that a block's backward keeps beside its input; it recomputes others.

    Args:
        save: Residuals kept on the device.
        offload: Residuals kept in the host's memory.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ResidualNames:
        """The names in `text`.

        Raises:
            InputError: The text is not of that form, or says one thing twice.

        Example:
            >>> ResidualNames.parse("save:mlp_up+offload:attention_qkv/attention_out")
            ResidualNames(save=('mlp_up',), offload=('attention_qkv', 'attention_out'))
        """
        named: dict[str, tuple[str, ...]] = {}
        for part in text.split("+"):
            way, _, names = part.partition(":")
            if way not in _RESIDUAL_WAYS or not re.fullmatch(r"\w+(/\w+)*", names):
                raise InputError(
                    f"remat={text}: {part!r} names no residuals; {_RESIDUAL_FORM}",
                    key="layout.no_residuals_named",
                )
            if way in named:
                raise InputError(
                    f"remat={text}: {way!r} is given twice; give it once",
                    key="layout.repeated_remat_way",
                )
            named[way] = tuple(names.split("/"))
        every = [name for names in named.values() for name in names]
        for name in every:
            if every.count(name) > 1:
                raise InputError(
                    f"remat={text}: {name!r} is named twice; name it once",
                    key="layout.repeated_residual",
                )
        return cls(**named)

    @property
    def every(self) -> tuple[str, ...]:
        """All names."""
        return (*self.save, *self.offload)


def split_axes(
    zero: int, zero_axes: tuple[str, ...], *, fsdp: int, expert: int
) -> tuple[str, ...]:
    """Return `Layout.split_axes` of these keys and sizes."""
    if zero == 0:
        return ()
    if zero_axes:
        return zero_axes
    axis = "fsdp" if zero == 3 or fsdp > 1 else "data"
    return (axis,) if expert == 1 else (axis, "expert")


def is_named(remat: str) -> bool:
    """Return True if a remat policy names residuals."""
    return ":" in remat or "+" in remat


@lru_cache(maxsize=1024)
def named_residuals(remat: str) -> ResidualNames | None:
    """Return the residuals that a remat policy names; None if it is one word."""
    return ResidualNames.parse(remat) if is_named(remat) else None


_DEFAULTS = {field.name: field.default for field in fields(Layout)}


def _check_count(name: str, value: object) -> None:
    if type(value) is int and value > 0:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    absorbs = value == -1 and name in MESH_AXES
    if not whole or not (absorbs or value >= 1):  # type: ignore[operator]
        ways = " or -1 (absorbs the remaining devices)" if name in MESH_AXES else ""
        raise InputError(
            f"{name}={value!r}: must be a whole number of at least 1{ways}",
            key="layout.not_whole_number",
        )


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        known = ", ".join(_format_value(choice) for choice in choices)
        more = ", or names: save:NAME/NAME, offload:NAME" if name == "remat" else ""
        raise InputError(
            f"{name}={_format_value(value)}: must be one of {known}{more}",
            key="layout.unknown_value",
        )


def _check_zero_axes(axes: tuple[str, ...]) -> None:
    in_order = tuple(axis for axis in ZERO_AXES if axis in axes)
    if axes != in_order:
        raise InputError(
            f"zero_axes={_format_value(axes)}: must be one or more of "
            f"{', '.join(ZERO_AXES)}, in this order, as {'/'.join(ZERO_AXES)}",
            key="layout.wrong_zero_axes",
        )


def _parse_value(key: str, text: str) -> object:
    default = _DEFAULTS[key]
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text, text)
    if isinstance(default, int):
        return int(text) if re.fullmatch(r"-?\d+", text) else text
    if isinstance(default, tuple):
        if text == BY_COST:
            return text
        return tuple(
            int(part) if part.isdecimal() else part for part in text.split("/")
        )
    return text


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value)
