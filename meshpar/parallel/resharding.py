"""Parameters from one layout to another, on the same devices or on others.

Array by array, and of stacked arrays layer by layer, each gone where it was as soon as
it is where it is to be. What has no room beside all others (`resharding_order`) goes by
way of the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.machine.mesh import make_mesh, platform_of
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, Params, flat
from meshpar.parallel.array_move import ArrayMove
from meshpar.parallel.pipeline.program import arranged_for
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.parallel.resharding_bytes import NOTHING, MovedBytes, moved_bytes
from meshpar.parallel.resharding_order import MovingMemory, ordered
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
