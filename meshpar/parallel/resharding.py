"""Parameters from one layout to another, on the same devices or on others.

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

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, Layout
from meshpar.machine.mesh import make_mesh, platform_of
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, Params, flat
from meshpar.parallel.array_move import ArrayMove, DeviceBytes
from meshpar.parallel.pipeline.program import arranged_for
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import path_name


@dataclass(frozen=True, kw_only=True)
class Lying:
    """How a model's parameters lie under a layout: order of layers, and shardings.

    Args:
        model: Arranged for the layout's stages.
        shardings: Tree of the sharding of each parameter; None where they lie as they
            happen to.
        num_stages: Of the mesh that arrays so lie on.
    """

    model: Model
    shardings: Any = None
    num_stages: int = 1

    @classmethod
    def of(
        cls,
        model: Model,
        layout: Layout | str,
        *,
        rules: Rules | None = None,
        mesh: Mesh | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> Lying:
        """As a training step lays them out.

        Args:
            model: As given.
            layout: The layout.
            rules: Logical axis -> mesh axes; the layout's preset when absent.
            mesh: The devices.
            devices: Instead of a mesh; JAX's by default.

        Raises:
            InputError: The layout does not fit model or devices.
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
            platform=platform_of(mesh),
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
    """Parameters as another layout has them.

    Args:
        params: As `from_layout` has them, such as `state.params`. What each of several
            processes has whole must be equal in all; it is not compared.
        from_layout: How they lie. Of what is wrong in it only another number of stages
            can be seen, and another schedule or other `chunks` not: where it is not the
            one that laid them out, layers come out in another order.
        to_layout: How they are to lie.
        model: Whose they are.
        rules: Of the new layout; its preset when absent.
        devices: Of the new layout; JAX's by default.
        donate: Whether each array's memory is given up once it is moved: `params`
            cannot be used again.
        by_host: Whether an array that has no room beside all others, so that the peak
            would be more than one layer above the larger of the two layouts, goes by
            way of the host's memory. Without, it lies in both for a while. Of several
            processes it always does.

    Raises:
        InputError: They are not the model's, or lie on another number of stages; or
            they are to go from some of several processes' devices to others.
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
    source = Lying(model=arranged_for(model, layout), num_stages=layout.stage)
    target = Lying.of(model, to_layout, rules=rules, devices=devices)
    return moved(params, source, target, donate=donate, by_host=by_host)


def reshard_bytes(params: Params, source: Lying, target: Lying) -> MovedBytes:
    """What `moved` sends at least, by mesh axis and link: what devices lack.

    Args:
        params: Arrays on a mesh, as `source` has them.
        source: How they lie.
        target: How they are to lie.
    """
    found = NOTHING
    for one in _moves(params, source, target, None):
        sharding = one.array.sharding
        if not isinstance(sharding, NamedSharding):
            raise InputError(
                f"{one.path} lies on one device by itself; lay it out on a mesh first",
                key="mesh.array_without_mesh",
            )
        found += moved_bytes(
            one.wanted.stacked_shape,
            one.array.dtype.itemsize,
            sharding,
            one.sharding,
            one.places,
        )
    return found


def reshard_memory(
    params: Params, source: Lying, target: Lying, *, by_host: bool = True
) -> MovingMemory:
    """What `reshard` takes of a device's memory, from its compiled programs.

    Args:
        params: Arrays as `source` has them.
        source: How they lie.
        target: How they are to lie.
        by_host: As in `reshard`.
    """
    return ordered(_moves(params, source, target, None), by_host=by_host).memory


def moved(
    params: Params,
    source: Lying,
    target: Lying,
    *,
    dtype: str | None = None,
    donate: bool = False,
    by_host: bool = True,
) -> Params:
    """The parameters as another layout has them.

    Args:
        params: Arrays as `source` has them: JAX's, NumPy's, or anything with a shape of
            which parts can be asked for, as of `meshpar.models.convert`.
        source: How they lie.
        target: How they are to lie.
        dtype: A `Layout.param_dtype` that numbers of half and full precision are
            rounded to; as they are when absent.
        donate: Whether each array is given up once it is moved.
        by_host: As in `reshard`, where they are given up.

    Raises:
        InputError: They are not the parameters of the model, or arrays of another
            number of stages.
    """
    found: dict[str, jax.Array] = {}
    moves = _moves(params, source, target, dtype)
    if not donate:
        for one in moves:
            found[one.path] = jax.block_until_ready(one.done())
    else:
        for one, parks in ordered(moves, by_host=by_host).steps:
            moved_ = one.parked() if parks else one.done()
            found[one.path] = jax.block_until_ready(moved_)
            if isinstance(one.array, jax.Array):
                one.array.delete()
    return jax.tree.map_with_path(lambda path, _: found[path_name(path)], params)


def _moves(
    params: Params, source: Lying, target: Lying, dtype: str | None
) -> list[ArrayMove]:
    given, wanted = flat(source.model.parameters), flat(target.model.parameters)
    _check(params, given)
    _check_stages(params, source.num_stages)
    shardings = _by_path(target.shardings)
    moves = [
        ArrayMove(
            path=path,
            array=array,
            given=given[path],
            wanted=wanted[path],
            sharding=shardings[path],
            dtype=_dtype(array, given[path], dtype),
        )
        for path, array in _by_path(params).items()
    ]
    for one in moves:
        one.check()
    return moves


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _dtype(array: Any, parameter: Parameter, wanted: str | None) -> Any:
    dtype = getattr(array, "dtype", parameter.dtype)
    if wanted is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.float32 if parameter.in_full else PARAM_DTYPES[wanted]


def _check(params: Params, known: dict[str, Parameter]) -> None:
    there = _by_path(params)
    for path in sorted(known.keys() - there.keys()):
        raise InputError(
            f"parameter {path} of the model is missing; there are "
            f"{', '.join(sorted(there)) or 'none'}",
            key="model.missing_parameter",
        )
    for path in sorted(there.keys() - known.keys()):
        raise InputError(
            f"{path} is no parameter of the model; leave it out",
            key="model.unknown_parameter",
        )
    for path, one in there.items():
        wanted = known[path].stacked_shape
        if tuple(one.shape) != wanted:
            raise InputError(
                f"parameter {path} has shape {tuple(one.shape)}, but in the layout "
                f"that is said to be its own it has {wanted}; say which layout it "
                "lies in",
                key="layout.parameter_of_other_layout",
            )


def _check_stages(params: Params, num_stages: int) -> None:
    """Refuses stages that nobody speaks of: their layers may lie in another order."""
    for path, array in _by_path(params).items():
        mesh = getattr(getattr(array, "sharding", None), "mesh", None)
        there = num_stages if mesh is None else mesh.shape.get("stage", num_stages)
        if there != num_stages:
            raise InputError(
                f"parameter {path} lies on {there} stages, which may have "
                "the layers in another order than the layout that is said to be its "
                f"own, of {num_stages}; say from_layout=, such as step.layout",
                key="layout.parameter_of_other_stages",
            )


@dataclass(frozen=True, kw_only=True)
class MovingMemory:
    """Bytes of a device while parameters move.

    Args:
        before: As they lie.
        after: As they are to lie.
        layer: One layer of all of them, in the layout where that is more.
        peak: Most at any time, programs' temporary memory among them.
        by_host: Of what goes by way of the host's memory, as it is to lie.
    """

    before: int
    after: int
    layer: int
    peak: int
    by_host: int

    @property
    def limit(self) -> int:
        """What `peak` is to stay below."""
        return max(self.before, self.after) + self.layer


@dataclass(frozen=True, kw_only=True)
class Order:
    """Arrays as they move, one after another.

    Args:
        steps: Each array, and whether it goes by way of the host.
        memory: What that takes.
    """

    steps: tuple[tuple[ArrayMove, bool], ...]
    memory: MovingMemory


def ordered(moves: Sequence[ArrayMove], *, by_host: bool = True) -> Order:
    """The order of some arrays that are given up as they move.

    Args:
        moves: Of all parameters.
        by_host: Whether what has no room may go by way of the host's memory.
    """
    sizes = [one.bytes for one in moves]
    before = sum(size.before for size in sizes)
    after = sum(size.after for size in sizes)
    memory = MovingMemory(
        before=before,
        after=after,
        layer=_layer_bytes(sizes),
        peak=max(before, after),
        by_host=0,
    )
    if not any(one.meets_itself for one in moves):
        extra = max((one.extra_bytes for one in moves), default=0)
        memory = replace(memory, peak=memory.peak + extra)
        return Order(steps=tuple((one, False) for one in moves), memory=memory)
    held = peak = before
    of_host = 0
    steps = []
    for one in sorted(moves, key=_urgency):
        size = one.bytes
        needed = held + size.after + one.extra_bytes
        parks = by_host and needed > memory.limit and one.can_park
        if parks:
            needed, of_host = held + max(size.growth, 0), of_host + size.after
        steps.append((one, parks))
        held += size.growth
        peak = max(peak, needed)
    memory = replace(memory, peak=peak, by_host=of_host)
    return Order(steps=tuple(steps), memory=memory)


def _layer_bytes(sizes: Sequence[DeviceBytes]) -> int:
    layers = (size.layer_before for size in sizes), (size.layer_after for size in sizes)
    return max(map(sum, layers))


def _urgency(one: ArrayMove) -> tuple[bool, int]:
    size = one.bytes
    grows = size.growth > 0
    return grows, -size.before if grows else size.after


Box = tuple[range, ...]
"""Of each dim, the places that a device has."""

ELSEWHERE = "other devices"
"""In a mesh axis' place, of what comes from devices outside the new mesh's."""


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """Bytes that devices receive, none of which they had.

    Args:
        total: Of all devices.
        by_axis: The outermost mesh axis of the old layout that each byte crosses, from
            the nearest device that has it.
        by_link: `host` between devices of one process, `network` between processes.
    """

    total: int
    by_axis: dict[str, int]
    by_link: dict[str, int]

    def __add__(self, other: MovedBytes) -> MovedBytes:
        return MovedBytes(
            total=self.total + other.total,
            by_axis=dict(Counter(self.by_axis) + Counter(other.by_axis)),
            by_link=dict(Counter(self.by_link) + Counter(other.by_link)),
        )


NOTHING = MovedBytes(total=0, by_axis={}, by_link={})


def moved_bytes(
    shape: Sequence[int],
    itemsize: int,
    source: NamedSharding,
    target: NamedSharding,
    places: tuple[Sequence[int], Sequence[int]] | None = None,
) -> MovedBytes:
    """What laying one array out otherwise sends at least.

    Args:
        shape: Of the array as `target` splits it.
        itemsize: Bytes of a value.
        source: How it lies.
        target: How it is to lie.
        places: The layer at each place of the leading dim, before and after; None where
            both are alike.
    """
    before, after = places or (range(shape[0] if shape else 0),) * 2
    first = (len(before), *shape[1:]) if shape else ()
    holders = _holders(source, first)
    coordinates = _coordinates(source)
    found = NOTHING
    for device, box in _boxes(target, shape):
        own_layers = {after[at] for at in box[0]} - {-1} if box else set()
        for there, devices in holders.items():
            values = _common(box, there, own_layers, before)
            if device in devices or not values:
                continue
            axis, holder = _nearest(device, devices, coordinates)
            link = "host" if holder.process_index == device.process_index else "network"
            size = values * itemsize
            found += MovedBytes(total=size, by_axis={axis: size}, by_link={link: size})
    return found


def _boxes(
    sharding: NamedSharding, shape: Sequence[int]
) -> Iterator[tuple[jax.Device, Box]]:
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        parts = zip(index or (), shape, strict=True)
        yield device, tuple(range(*part.indices(size)) for part, size in parts)


def _holders(
    sharding: NamedSharding, shape: Sequence[int]
) -> dict[Box, list[jax.Device]]:
    found: dict[Box, list[jax.Device]] = {}
    for device, box in _boxes(sharding, shape):
        found.setdefault(box, []).append(device)
    return found


def _common(box: Box, there: Box, layers: set[int], before: Sequence[int]) -> int:
    if not box:
        return 1
    here = len(layers & {before[at] for at in there[0]})
    others = (
        max(0, min(one.stop, other.stop) - max(one.start, other.start))
        for one, other in zip(box[1:], there[1:], strict=True)
    )
    return here * math.prod(others)


def _coordinates(sharding: NamedSharding) -> dict[jax.Device, tuple[int, ...]]:
    devices: Any = sharding.mesh.devices
    return {device: at for at, device in np.ndenumerate(devices)}


def _nearest(
    device: jax.Device,
    holders: Sequence[jax.Device],
    coordinates: dict[jax.Device, tuple[int, ...]],
) -> tuple[str, jax.Device]:
    """The outermost mesh axis that a byte crosses, and the device that it comes from.

    Of several devices that have it, the one that differs in inner axes only.
    """
    if device not in coordinates:
        return ELSEWHERE, holders[0]
    own = coordinates[device]

    def outermost(holder: jax.Device) -> int:
        pairs = zip(own, coordinates[holder], strict=True)
        return next(at for at, (one, other) in enumerate(pairs) if one != other)

    holder = max(holders, key=outermost)
    return MESH_AXES[outermost(holder)], holder
