"""A channel for each collective of emulated devices, by which XLA:CPU pairs them."""

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

_LOWER = "lower_jaxpr_to_module"
_CHANNEL, _NAME = "channel_handle", "sym_name"
_OF_THE_HOST = ("stablehlo.send", "stablehlo.recv")
_SHAPING = {
    *("stablehlo.broadcast_in_dim", "stablehlo.convert"),
    *("stablehlo.reshape", "stablehlo.transpose"),
}
"""What JAX puts before a collective, anew for each."""
_CALLED = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Operations that run another function, and their attribute with its name."""


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
    writes down once what two loops do alike. Equal collectives of one operand, which
    XLA makes one of, share theirs.

    Args:
        module: In StableHLO.
    """
    functions = {
        ir.StringAttr(one.attributes[_NAME]).value: _read(one.operation)
        for one in module.body.operations
        if one.operation.name == "func.func"
    }
    of_host = [_handle(x) for each in functions.values() for x in each.of_host]
    unused = itertools.count(1 + max((one.handle for one in of_host), default=0))
    for function in _copied_for_each_call(module, functions):
        channels: dict[tuple, int] = {}
        for collective in function.collectives:
            alike = _what_it_does(collective)
            if alike not in channels:
                channels[alike] = next(unused)
            kind = _handle(collective).channel_type
            handle = stablehlo.ChannelHandle.get(channels[alike], kind)
            collective.attributes[_CHANNEL] = handle


@dataclass(kw_only=True)
class _Function:
    """A function of a module, and what is in it, in loops too.

    Args:
        operation: What defines it.
        collectives: Operations with a channel between devices.
        of_host: Operations with a channel to the host.
        calls: Operations that run another function.
    """

    operation: ir.Operation
    collectives: list[ir.Operation] = field(default_factory=list)
    of_host: list[ir.Operation] = field(default_factory=list)
    calls: list[ir.Operation] = field(default_factory=list)


def _read(function: ir.Operation) -> _Function:
    found = _Function(operation=function)

    def note(operation: ir.Operation) -> ir.WalkResult:
        if _CHANNEL in operation.attributes:
            to_host = operation.name in _OF_THE_HOST
            (found.of_host if to_host else found.collectives).append(operation)
        elif operation.name in _CALLED:
            found.calls.append(operation)
        return ir.WalkResult.ADVANCE

    function.walk(note)
    return found


def _copied_for_each_call(
    module: ir.Module, functions: dict[str, _Function]
) -> list[_Function]:
    """Functions with collectives, copied so that each is called once.

    Args:
        module: Where copies are put.
        functions: By name; copies are added.
    """
    holding = _with_collectives(functions)
    called = {_called(call) for each in functions.values() for call in each.calls}
    found, seen = [], set()
    left = [name for name in functions if name in holding - called]
    while left:
        function = functions[left.pop()]
        found.append(function)
        for call in function.calls:
            name = _called(call)
            if name not in holding:
                continue
            if name in seen:
                name = _copied(module, functions, call)
                holding.add(name)
            seen.add(name)
            left.append(name)
    return found


def _with_collectives(functions: Mapping[str, _Function]) -> set[str]:
    """Names of functions that have collectives, or call one that does."""
    found = {name for name, each in functions.items() if each.collectives}
    calls = {
        name: {_called(call) for call in each.calls} for name, each in functions.items()
    }
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def _copied(
    module: ir.Module, functions: dict[str, _Function], call: ir.Operation
) -> str:
    """The name of a copy of a function, which the call is of from now on."""
    given = _called(call)
    numbers = itertools.count(len(functions))
    name = next(x for n in numbers if (x := f"{given}_copy_{n}") not in functions)
    copy = functions[given].operation.clone()
    copy.attributes[_NAME] = ir.StringAttr.get(name)
    call.attributes[_CALLED[call.name]] = ir.FlatSymbolRefAttr.get(name)
    module.body.append(copy)
    functions[name] = _read(copy)
    return name


def _what_it_does(collective: ir.Operation) -> tuple:
    """Equal of two collectives of a block whose results are the same."""
    inside = [
        operation.name
        for region in collective.regions
        for block in region.blocks
        for operation in block.operations
    ]
    operands = [_made_of(operand) for operand in collective.operands]
    return collective.block, *_said(collective), tuple(inside), *operands


def _made_of(value: ir.Value) -> tuple:
    """A value that is given another shape, and how."""
    how: list[Any] = []
    while not isinstance(value.owner, ir.Block):
        maker = value.owner.operation
        if maker.name not in _SHAPING:
            break
        how += _said(maker)
        [value] = maker.operands
    return value, *how


def _said(operation: ir.Operation) -> tuple:
    """An operation's name, attributes but the channel, and types of results."""
    given = operation.attributes
    attributes = sorted((name, str(given[name])) for name in given if name != _CHANNEL)
    types = [str(result.type) for result in operation.results]
    return operation.name, *attributes, *types


def _handle(operation: ir.Operation) -> stablehlo.ChannelHandle:
    return stablehlo.ChannelHandle(operation.attributes[_CHANNEL])


def _called(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes[_CALLED[call.name]]).value
