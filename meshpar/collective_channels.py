"""A channel for each collective of emulated devices, by which XLA:CPU pairs them."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

_LOWER = "lower_jaxpr_to_module"
_CHANNEL, _CALLED, _NAME = "channel_handle", "callee", "sym_name"
_BETWEEN_DEVICES = 1
"""Type of the channels that no host callback has."""


@functools.cache
def give_own_channels() -> None:
    """Lowers programs for CPUs so that no two collectives share a channel.

    JAX gives all of `jax.shard_map` channel 1, and XLA:CPU pairs a device's collective
    with any of the same channel and devices. Two loops that need nothing of each other
    run beside each other there, in any order on each device, so that one's collectives
    are paired with the other's: a block computed again beside its first run, an
    encoder's backward beside its decoder's gradients. Numbers were wrong, or the
    process hung or ended.

    Programs for other platforms, or for several, stay as they are.
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
        if tuple(platforms) == ("cpu",):
            with result.module.context:
                number_collectives(result.module)
        return result

    setattr(lowering, _LOWER, lowered)


def _lowering() -> ModuleType | None:
    """JAX's module that lowers; None where it does so otherwise than is known here."""
    try:
        # JAX has no public place between lowering and compiling.
        from jax._src.interpreters import mlir  # noqa: TID251
    except ImportError:
        return None
    lower = getattr(mlir, _LOWER, None)
    known = lower is not None and "platforms" in inspect.signature(lower).parameters
    return mlir if known else None


def number_collectives(module: ir.Module) -> None:
    """Gives each collective of a program a channel that no other has, in place.

    A function with collectives that is called several times becomes as many: JAX
    writes down once what two loops do alike.

    Args:
        module: In StableHLO.
    """
    functions = {
        _text(one.operation, _NAME): _read(one.operation)
        for one in module.body.operations
        if one.operation.name == "func.func"
    }
    taken = (_handle(one).handle for of in functions.values() for one in of.channels)
    channels = itertools.count(1 + max(taken, default=0))
    for function in _one_for_each_call(module, functions):
        for one in function.channels:
            if _handle(one).channel_type == _BETWEEN_DEVICES:
                handle = stablehlo.ChannelHandle.get(next(channels), _BETWEEN_DEVICES)
                one.attributes[_CHANNEL] = handle


@dataclass(frozen=True)
class _Function:
    """A function of a module.

    Args:
        operation: It.
        channels: Operations in it that have one, in loops too.
        calls: Calls of other functions in it.
    """

    operation: ir.Operation
    channels: tuple[ir.Operation, ...]
    calls: tuple[ir.Operation, ...]


def _read(function: ir.Operation) -> _Function:
    channels, calls = [], []

    def note(one: ir.Operation) -> ir.WalkResult:
        if _CHANNEL in one.attributes:
            channels.append(one)
        elif one.name == "func.call":
            calls.append(one)
        return ir.WalkResult.ADVANCE

    function.walk(note)
    return _Function(function, tuple(channels), tuple(calls))


def _one_for_each_call(
    module: ir.Module, functions: dict[str, _Function]
) -> list[_Function]:
    """Functions with collectives, each called once: copies are made where it is more.

    Args:
        module: Where copies are put.
        functions: By name; copies are added.
    """
    holding = _with_collectives(functions)
    called = {_text(call, _CALLED) for of in functions.values() for call in of.calls}
    found, seen = [], set()
    left = [name for name in functions if name in holding - called]
    while left:
        function = functions[left.pop()]
        found.append(function)
        for call in function.calls:
            name = _text(call, _CALLED)
            if name not in holding:
                continue
            if name in seen:
                name = _copied(module, functions, call)
            seen.add(name)
            left.append(name)
    return found


def _copied(
    module: ir.Module, functions: dict[str, _Function], call: ir.Operation
) -> str:
    """The name of a copy of a function, which the call is of from now on."""
    name = _text(call, _CALLED)
    copy = functions[name].operation.clone()
    name = f"{name}_copy_{len(functions)}"
    copy.attributes[_NAME] = ir.StringAttr.get(name)
    call.attributes[_CALLED] = ir.FlatSymbolRefAttr.get(name)
    module.body.append(copy)
    functions[name] = _read(copy)
    return name


def _with_collectives(functions: Mapping[str, _Function]) -> set[str]:
    """Names of functions that have collectives, or call one that does."""
    found = {name for name, one in functions.items() if one.channels}
    calls = {
        name: {_text(call, _CALLED) for call in one.calls}
        for name, one in functions.items()
    }
    while more := {name for name, of in calls.items() if of & found} - found:
        found |= more
    return found


def _handle(operation: ir.Operation) -> stablehlo.ChannelHandle:
    return stablehlo.ChannelHandle(operation.attributes[_CHANNEL])


def _text(operation: ir.Operation, attribute: str) -> str:
    """The value of a name, or of a reference to one."""
    value = operation.attributes[attribute]
    kind = ir.FlatSymbolRefAttr if attribute == _CALLED else ir.StringAttr
    return kind(value).value
