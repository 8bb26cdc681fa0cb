"""A channel for each collective of emulated devices, by which XLA:CPU pairs them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from jax.interpreters import mlir

from meshpar.collective_kinds import WRITTEN_AS

_ATTRIBUTE = "channel_handle"


@functools.cache
def give_own_channels() -> None:
    """Lowers collectives for CPUs with a channel that no other of the program has.

    JAX gives all of `jax.shard_map` channel 1, and XLA:CPU pairs a device's collective
    with any of the same channel and devices. Two loops that need nothing of each other
    run beside each other there, in any order on each device, so that one's collectives
    are paired with the other's: a block computed again beside its first run, an
    encoder's backward beside its decoder's gradients. Numbers were wrong, or the
    process hung or ended.

    Nothing else about a program changes, nor any of another platform.
    """
    rules = getattr(mlir, "_lowerings", None)
    if rules is None or not hasattr(mlir.ModuleContext, "new_channel"):
        warnings.warn(
            "meshpar does not know how this JAX lowers collectives, so those of "
            "emulated devices may be paired wrongly; use a version of JAX that "
            "meshpar is tested with",
            stacklevel=2,
        )
        return
    for primitive in [one for one in rules if one.name in WRITTEN_AS]:
        rule = _with_own_channel(rules[primitive].rule)
        # A cached rule would be lowered once for all collectives that look alike.
        mlir.register_lowering(primitive, rule, platform="cpu", cacheable=False)


def _with_own_channel(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def lowered(ctx: Any, *operands: Any, **params: Any) -> Any:
        results = rule(ctx, *operands, **params)
        values, _ = mlir.ir_tree_registry.flatten(results)
        for operation in _made_of(values, operands):
            if _ATTRIBUTE in operation.attributes:
                channel = ctx.module_context.new_channel()
                operation.attributes[_ATTRIBUTE] = _handle(channel)
        return results

    return lowered


def _handle(channel: int) -> Any:
    kind = mlir.DEVICE_TO_DEVICE_TYPE
    return mlir.ir.Attribute.parse(
        f"#stablehlo.channel_handle<handle = {channel}, type = {kind}>"
    )


def _made_of(results: Iterable[Any], operands: Iterable[Any]) -> list[Any]:
    """The operations that made results of operands, each once."""
    seen, left, found = list(operands), list(results), []
    while left:
        value = left.pop()
        if value in seen or isinstance(value.owner, mlir.ir.Block):
            continue
        seen.append(value)
        if value.owner not in found:
            found.append(value.owner)
            left += value.owner.operands
    return found
