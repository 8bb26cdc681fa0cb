"""Move parameters from one layout to another, on the same devices or on others.

Arrays move one after another, stacked arrays layer by layer, and each is freed once it
has moved. While an array moves, a device holds it twice: as it was and as it is to be.
First go those that become smaller, the smallest first, then those that grow, the
largest first (Johnson 1954: two machines in a row, by time on each, here bytes). An
array that even so has no room below

    max(all before, all after) + one layer

is copied into the host's memory, freed, and read from there: no device then holds it
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.machine.mesh import make_mesh, mesh_platform
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, Params, flat
from meshpar.parallel.array_move import ArrayMove
from meshpar.parallel.moved_bytes import NOTHING, MovedBytes, moved_bytes
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import path_name


@dataclass(frozen=True, kw_only=True)
class ParameterPlacement:
    """Order of layers and shardings of a model's parameters under a layout.

    Args:
        model: The model, arranged for the layout's stages.
        shardings: Tree of the sharding of each parameter; None if it is unknown.
        num_stages: Stages of the mesh.
    """

    model: Model
    shardings: Any = None
    num_stages: int = 1

    @classmethod
    def from_layout(
        cls,
        model: Model,
        layout: Layout | str,
        *,
        rules: Rules | None = None,
        mesh: Mesh | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> ParameterPlacement:
        """Return the order and shardings that a training step gives parameters.

        Args:
            model: The model, in its own order of layers.
            layout: The layout.
            rules: Logical axis -> mesh axes; the layout's preset when absent.
            mesh: The mesh; made from `devices` when absent.
            devices: Devices of the mesh; JAX's by default.

        Raises:
            InputError: The layout does not fit the model or the devices.
            RuleError: A parameter cannot be laid out.
        """
        layout = Layout.of(layout)
        mesh = make_mesh(layout, devices) if mesh is None else mesh
        layout = layout.resolve(mesh.size)
        arranged = arranged_for(model, layout)
        placement = Placement(
            model=arranged,
            layout=layout,
            rules=default_rules(layout) if rules is None else rules,
            mesh=mesh,
            platform=mesh_platform(mesh),
        )
        shardings = jax.tree.map(
            lambda stored: NamedSharding(mesh, stored.spec), placement.stored
        )
        return cls(model=arranged, shardings=shardings, num_stages=layout.stage)


def reshard(
    params: Params,
    from_layout: Layout | str,
    to_layout: Layout | str,
    *,
    model: Model,
    rules: Rules | None = None,
    devices: Sequence[jax.Device] | None = None,
    donate: bool = True,
    by_host: bool = True,
) -> Params:
    """Move parameters to another layout.

    Args:
        params: Parameters under `from_layout`, such as `state.params`. Arrays that each
            of several processes holds whole must be equal in all; this is not checked.
        from_layout: The layout of `params`. A wrong number of stages is detected, but
            a wrong schedule or `chunks` is not, and would permute the layers.
        to_layout: The new layout.
        model: The model of the parameters.
        rules: Rules of the new layout; its preset when absent.
        devices: Devices of the new layout; JAX's by default.
        donate: Free each array once it has moved: `params` cannot be used again.
        by_host: Move an array through the host's memory if the peak would otherwise be
            more than one layer above the larger of the two layouts. If False, a device
            holds it twice for a while; with several processes it always does.

    Raises:
        InputError: The parameters are not the model's, or are on another number of
            stages, or would move between devices of different processes.
        RuleError: A parameter cannot be laid out.

    Example:
        >>> from meshpar.models.presets import build
        >>> model = build("test")
        >>> two = jax.devices()[:2]
        >>> params = model.init(0)
        >>> moved = reshard(params, "data=1", "tensor=2", model=model, devices=two)
        >>> tuple(moved["blocks"]["mlp"]["down"].sharding.spec)
        (None, 'tensor', None)
    """
    check_model(model)
    layout = Layout.of(from_layout)
    source = ParameterPlacement(
        model=arranged_for(model, layout), num_stages=layout.stage
    )
    target = ParameterPlacement.from_layout(
        model, to_layout, rules=rules, devices=devices
    )
    return moved(params, source, target, donate=donate, by_host=by_host)


def reshard_bytes(
    params: Params, source: ParameterPlacement, target: ParameterPlacement
) -> MovedBytes:
    """Return the least bytes that a move sends, by mesh axis and link.

    Args:
        params: Arrays on a mesh, laid out as `source`.
        source: Order and shardings before the move.
        target: Order and shardings after the move.
    """
    total = NOTHING
    for move in _moves(params, source, target, None):
        sharding = move.array.sharding
        if not isinstance(sharding, NamedSharding):
            raise InputError(
                f"{move.path} lies on one device by itself; lay it out on a mesh first",
                key="mesh.array_without_mesh",
            )
        total += moved_bytes(
            move.wanted.stacked_shape,
            move.array.dtype.itemsize,
            sharding,
            move.sharding,
            move.places,
        )
    return total


def reshard_memory(
    params: Params,
    source: ParameterPlacement,
    target: ParameterPlacement,
    *,
    by_host: bool = True,
) -> MovingMemory:
    """Return the memory that `reshard` takes on a device, from its compiled programs.

    Args:
        params: Arrays laid out as `source`.
        source: Order and shardings before the move.
        target: Order and shardings after the move.
        by_host: As in `reshard`.
    """
    return ordered(_moves(params, source, target, None), by_host=by_host).memory


def moved(
    params: Params,
    source: ParameterPlacement,
    target: ParameterPlacement,
    *,
    dtype: str | None = None,
    donate: bool = False,
    by_host: bool = True,
) -> Params:
    """Move parameters to another order and other shardings.

    Args:
        params: Arrays laid out as `source`: JAX's, NumPy's, or objects with a shape
            whose parts can be read, as `meshpar.models.convert` makes them.
        source: Order and shardings before the move.
        target: Order and shardings after the move.
        dtype: A `Layout.param_dtype` that floating-point numbers are rounded to; they
            keep their dtype when absent.
        donate: Free each array once it has moved.
        by_host: As in `reshard`, if arrays are freed.

    Raises:
        InputError: The arrays are not the model's parameters, or are on another number
            of stages.
    """
    results: dict[str, jax.Array] = {}
    moves = _moves(params, source, target, dtype)
    steps = (
        ordered(moves, by_host=by_host).steps
        if donate
        else [(move, False) for move in moves]
    )
    for move, through_host in steps:
        result = move.moved_by_host() if through_host else move.copied()
        results[move.path] = jax.block_until_ready(result)
        if donate and isinstance(move.array, jax.Array):
            move.array.delete()
    return jax.tree.map_with_path(lambda path, _: results[path_name(path)], params)


def _moves(
    params: Params,
    source: ParameterPlacement,
    target: ParameterPlacement,
    dtype: str | None,
) -> list[ArrayMove]:
    given, wanted = flat(source.model.parameters), flat(target.model.parameters)
    _check(params, given)
    _check_stages(params, source.num_stages)
    shardings = _by_path(target.shardings)
    moves = []
    for path, array in _by_path(params).items():
        own = getattr(array, "dtype", given[path].dtype)
        if dtype is not None and jnp.issubdtype(own, jnp.floating):
            own = jnp.float32 if given[path].in_full else PARAM_DTYPES[dtype]
        move = ArrayMove(
            path=path,
            array=array,
            given=given[path],
            wanted=wanted[path],
            sharding=shardings[path],
            dtype=own,
        )
        move.check()
        moves.append(move)
    return moves


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _check(params: Params, known: dict[str, Parameter]) -> None:
    arrays = _by_path(params)
    for path in sorted(known.keys() - arrays.keys()):
        raise InputError(
            f"parameter {path} of the model is missing; there are "
            f"{', '.join(sorted(arrays)) or 'none'}",
            key="model.missing_parameter",
        )
    for path in sorted(arrays.keys() - known.keys()):
        raise InputError(
            f"{path} is no parameter of the model; leave it out",
            key="model.unknown_parameter",
        )
    for path, array in arrays.items():
        wanted = known[path].stacked_shape
        if tuple(array.shape) != wanted:
            raise InputError(
                f"parameter {path} has shape {tuple(array.shape)}, but {wanted} in "
                "from_layout; give the layout that it has",
                key="layout.parameter_of_other_layout",
            )


def _check_stages(params: Params, num_stages: int) -> None:
    """Refuse arrays on another number of stages: their layers may be permuted."""
    for path, array in _by_path(params).items():
        mesh = getattr(getattr(array, "sharding", None), "mesh", None)
        own = num_stages if mesh is None else mesh.shape.get("stage", num_stages)
        if own != num_stages:
            raise InputError(
                f"parameter {path} is on {own} stages, but from_layout has "
                f"{num_stages}, maybe with the layers in another order; give its own "
                "layout as from_layout=, such as step.layout",
                key="layout.parameter_of_other_stages",
            )


@dataclass(frozen=True, kw_only=True)
class MovingMemory:
    """Bytes on a device while parameters move.

    Args:
        before: Bytes of the parameters before the move.
        after: Bytes of the parameters after the move.
        layer: Bytes of one layer of all of them, in the layout with more.
        peak: Most bytes at any time, with temporary memory of programs.
        by_host: Bytes after the move of arrays that move through the host's memory.
    """

    before: int
    after: int
    layer: int
    peak: int
    by_host: int

    @property
    def limit(self) -> int:
        """Return the bytes that `peak` should stay below."""
        return max(self.before, self.after) + self.layer


@dataclass(frozen=True, kw_only=True)
class Order:
    """Moves of arrays, one after another.

    Args:
        steps: Each move, and True if it goes through the host's memory.
        memory: The memory that they take.
    """

    steps: tuple[tuple[ArrayMove, bool], ...]
    memory: MovingMemory


def ordered(moves: Sequence[ArrayMove], *, by_host: bool = True) -> Order:
    """Order the moves of all parameters, whose arrays are freed as they move.

    Args:
        moves: A move for each parameter.
        by_host: Let arrays without room move through the host's memory.
    """

    def urgency(move: ArrayMove) -> tuple[bool, int]:
        grows = move.bytes.growth > 0
        return grows, -move.bytes.before if grows else move.bytes.after

    sizes = [move.bytes for move in moves]
    before = sum(size.before for size in sizes)
    after = sum(size.after for size in sizes)
    memory = MovingMemory(
        before=before,
        after=after,
        layer=max(
            sum(size.layer_before for size in sizes),
            sum(size.layer_after for size in sizes),
        ),
        peak=max(before, after),
        by_host=0,
    )
    if not any(move.meets_itself for move in moves):
        extra = max((move.extra_bytes for move in moves), default=0)
        memory = replace(memory, peak=memory.peak + extra)
        return Order(steps=tuple((move, False) for move in moves), memory=memory)
    held = peak = before
    host_bytes = 0
    steps = []
    for move in sorted(moves, key=urgency):
        size = move.bytes
        needed = held + size.after + move.extra_bytes
        through_host = by_host and needed > memory.limit and move.can_park
        if through_host:
            needed, host_bytes = held + max(size.growth, 0), host_bytes + size.after
        steps.append((move, through_host))
        held += size.growth
        peak = max(peak, needed)
    memory = replace(memory, peak=peak, by_host=host_bytes)
    return Order(steps=tuple(steps), memory=memory)
