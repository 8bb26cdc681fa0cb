"""Give each collective of emulated devices the channel by which XLA:CPU pairs it."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from meshpar.hardware.platforms import platform_named

_LOWER = "lower_jaxpr_to_module"
_CHANNEL, _NAME = "channel_handle", "sym_name"
_HOST_OPERATIONS = ("stablehlo.send", "stablehlo.recv")
_SHAPING = {
    *("stablehlo.broadcast_in_dim", "stablehlo.convert"),
    *("stablehlo.reshape", "stablehlo.transpose"),
}
"""Operations that JAX puts before a collective, separately for each."""
_CALLED = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Operations that call a function, and their attribute with its name."""


@functools.cache
def give_own_channels() -> None:
    """Lower programs for CPUs so that no two collectives share a channel.

    JAX gives all collectives of `jax.shard_map` channel 1, and XLA:CPU pairs a device's
    collective with any of the same channel and devices. Two independent loops run
    concurrently there, in any order on each device, so collectives of one were paired
    with those of the other: a block recomputed beside its first run, an encoder's
    backward beside its decoder's gradients. Numbers were wrong, or the process hung or
    ended.

    Programs for other platforms, or for several, do not change.
    """
    lowering = _lowering()
    if lowering is None:
        warnings.warn(
            "meshpar does not know how this JAX lowers programs, so collectives of "
            "emulated devices may be paired wrongly; use a version of JAX that "
            "meshpar is tested with",
            stacklevel=2,
        )
        return
    lower = getattr(lowering, _LOWER)

    @functools.wraps(lower)
    def lowered(*args: Any, platforms: Sequence[str], **options: Any) -> Any:
        result = lower(*args, platforms=platforms, **options)
        if len(platforms) == 1 and platform_named(platforms[0]).is_host:
            with result.module.context:
                number_collectives(result.module)
        return result

    setattr(lowering, _LOWER, lowered)


def _lowering() -> ModuleType | None:
    """Return JAX's module that lowers; None if it differs from the known one."""
    try:
        # JAX 0.10 to 0.12 has no public way in between lowering and compiling a call:
        # `jax.interpreters.mlir` has a copy of this function that JAX does not call,
        # and a lowering rule of its own sees a function's body once, not its calls.
        from jax._src.interpreters import mlir  # noqa: TID251
    except ImportError:
        return None
    lower = getattr(mlir, _LOWER, None)
    known = lower is not None and "platforms" in inspect.signature(lower).parameters
    return mlir if known else None


def number_collectives(module: ir.Module) -> None:
    """Give each collective of a StableHLO program its own channel, in place.

    A function with collectives that is called several times is copied for each call,
    because JAX lowers equal bodies of two loops once. Equal collectives of one operand,
    which XLA merges, share a channel.
    """
    functions = {
        ir.StringAttr(function.attributes[_NAME]).value: _read(function.operation)
        for function in module.body.operations
        if function.operation.name == "func.func"
    }
    host = [_handle(x) for each in functions.values() for x in each.host_operations]
    unused = itertools.count(1 + max((handle.handle for handle in host), default=0))
    for function in _copied_for_each_call(module, functions):
        channels: dict[tuple, int] = {}
        for collective in function.collectives:
            signature = _signature(collective)
            if signature not in channels:
                channels[signature] = next(unused)
            kind = _handle(collective).channel_type
            handle = stablehlo.ChannelHandle.get(channels[signature], kind)
            collective.attributes[_CHANNEL] = handle


@dataclass(kw_only=True)
class _Function:
    """A function of a module, and operations in it and in its loops.

    Args:
        operation: The definition of the function.
        collectives: Operations with a channel between devices.
        host_operations: Operations with a channel to the host.
        calls: Operations that call a function.
    """

    operation: ir.Operation
    collectives: list[ir.Operation] = field(default_factory=list)
    host_operations: list[ir.Operation] = field(default_factory=list)
    calls: list[ir.Operation] = field(default_factory=list)


def _read(function: ir.Operation) -> _Function:
    result = _Function(operation=function)

    def note(operation: ir.Operation) -> ir.WalkResult:
        if _CHANNEL in operation.attributes:
            to_host = operation.name in _HOST_OPERATIONS
            kind = result.host_operations if to_host else result.collectives
            kind.append(operation)
        elif operation.name in _CALLED:
            result.calls.append(operation)
        return ir.WalkResult.ADVANCE

    function.walk(note)
    return result


def _copied_for_each_call(
    module: ir.Module, functions: dict[str, _Function]
) -> list[_Function]:
    """Return functions with collectives, copied so that each is called once.

    Args:
        module: The module, to which copies are added.
        functions: Functions by name, to which copies are added.
    """
    holding = _with_collectives(functions)
    called = {_called(call) for each in functions.values() for call in each.calls}
    result, seen = [], set()
    left = [name for name in functions if name in holding - called]
    while left:
        function = functions[left.pop()]
        result.append(function)
        for call in function.calls:
            name = _called(call)
            if name not in holding:
                continue
            if name in seen:
                name = _copied(module, functions, call)
                holding.add(name)
            seen.add(name)
            left.append(name)
    return result


def _with_collectives(functions: Mapping[str, _Function]) -> set[str]:
    """Return names of functions that have collectives or call one that does."""
    names = {name for name, each in functions.items() if each.collectives}
    calls = {
        name: {_called(call) for call in each.calls} for name, each in functions.items()
    }
    while more := {name for name, called in calls.items() if called & names} - names:
        names |= more
    return names


def _copied(
    module: ir.Module, functions: dict[str, _Function], call: ir.Operation
) -> str:
    """Copy the called function, let the call name the copy, and return that name."""
    given = _called(call)
    numbers = itertools.count(len(functions))
    name = next(x for n in numbers if (x := f"{given}_copy_{n}") not in functions)
    copy = functions[given].operation.clone()
    copy.attributes[_NAME] = ir.StringAttr.get(name)
    call.attributes[_CALLED[call.name]] = ir.FlatSymbolRefAttr.get(name)
    module.body.append(copy)
    functions[name] = _read(copy)
    return name


def _signature(collective: ir.Operation) -> tuple:
    """Return a key that is equal for collectives of a block with equal results."""
    inside = [
        operation.name
        for region in collective.regions
        for block in region.blocks
        for operation in block.operations
    ]
    operands = [_source(operand) for operand in collective.operands]
    return collective.block, *_description(collective), tuple(inside), *operands


def _source(value: ir.Value) -> tuple:
    """Return the value that was reshaped into this one, and the operations."""
    operations: list[Any] = []
    while not isinstance(value.owner, ir.Block):
        maker = value.owner.operation
        if maker.name not in _SHAPING:
            break
        operations += _description(maker)
        [value] = maker.operands
    return value, *operations


def _description(operation: ir.Operation) -> tuple:
    """Return an operation's name, attributes without the channel, and result types."""
    all_attributes = operation.attributes
    attributes = sorted(
        (name, str(all_attributes[name])) for name in all_attributes if name != _CHANNEL
    )
    types = [str(result.type) for result in operation.results]
    return operation.name, *attributes, *types


def _handle(operation: ir.Operation) -> stablehlo.ChannelHandle:
    return stablehlo.ChannelHandle(operation.attributes[_CHANNEL])


def _called(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes[_CALLED[call.name]]).value
