"""Subject of an audit: a jitted function, its arguments, its expected collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.machine.mesh import mesh_platform, use_mesh
from meshpar.trace.walk import steps


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A function to compile, with all that explains its collectives.

    Args:
        function: A jitted function.
        arguments: Arrays or `jax.ShapeDtypeStruct`s, in any pytrees.
        mesh: Device i of the program is its i-th.
        platform: What it is compiled for: `cpu`, `gpu` or `tpu`.
        layout: The layout, if a training step of ours is audited.
        weights: Path -> whole shape (of one layer) of each parameter.
        sequence_axes: Mesh axes that split the residual stream's sequence.
        compiler_options: XLA's, that its jit has.
        notes: What its reader should know, a line each.
    """

    function: Any
    arguments: tuple[Any, ...]
    mesh: Mesh | AbstractMesh
    platform: str
    layout: Layout | None = None
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sequence_axes: tuple[str, ...] = ()
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return dict(self.mesh.shape)

    def with_options(self, options: Mapping[str, Any] | None) -> Subject:
        """Return it with other compiler options over its own; None leaves one out."""
        chosen = {**self.compiler_options, **(options or {})}
        kept = {name: value for name, value in chosen.items() if value is not None}
        return replace(self, compiler_options=kept)

    def lower(self) -> jax.stages.Lowered:
        """Return the function, lowered for its arguments on its mesh."""
        with use_mesh(self.mesh):
            return self.function.lower(*self.arguments)

    def flat(self) -> FlatFunction:
        """Return the function of flat arrays, with its shardings and donations."""
        everything, tree = jax.tree.flatten(self.arguments)
        arrays = {
            at: _shape(leaf)
            for at, leaf in enumerate(everything)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        }

        def function(*leaves: Any) -> list[Any]:
            # What is no array may be a static argument: it goes in as it is.
            given = dict(zip(arrays, leaves, strict=True))
            filled = [given.get(at, leaf) for at, leaf in enumerate(everything)]
            return jax.tree.leaves(self.function(*jax.tree.unflatten(tree, filled)))

        leaves = tuple(arrays.values())
        with use_mesh(self.mesh):
            traced = jax.jit(function).trace(*leaves)
        given = tuple(leaf.sharding for leaf in leaves)
        paths = self._weight_paths()
        flat = FlatFunction(
            function, leaves, traced.jaxpr, given, tuple(map(paths.get, arrays))
        )
        calls = (one for one in steps(traced.jaxpr) if "donated_invars" in one.params)
        call = next(calls, None)
        own_inputs = list(traced.jaxpr.jaxpr.invars)
        if call is None or list(call.invars) != own_inputs:
            return flat
        own = call.params["in_shardings"]
        return replace(
            flat,
            in_shardings=tuple(
                sharding if isinstance(sharding, Sharding) else other
                for sharding, other in zip(own, given, strict=True)
            ),
            out_shardings=tuple(
                sharding if isinstance(sharding, Sharding) else None
                for sharding in call.params["out_shardings"]
            ),
            donated=tuple(np.flatnonzero(call.params["donated_invars"]).tolist()),
        )

    def _weight_paths(self) -> dict[int, str]:
        """Return the path of each weight, by its position among all argument leaves.

        Parameters come before the optimizer state, which has the same paths.
        """
        positions: dict[str, int] = {}
        leaves = jax.tree_util.tree_leaves_with_path(self.arguments)
        for at, (keys, _) in enumerate(leaves):
            whole = f".{jax.tree_util.keystr(keys, simple=True, separator='.')}"
            for path in self.weights:
                if whole.endswith(f".{path}"):
                    positions.setdefault(path, at)
        return {at: path for path, at in positions.items()}


@dataclass(frozen=True)
class FlatFunction:
    """A function of flat arrays that returns flat arrays.

    Args:
        function: To be jitted.
        leaves: Its arguments, arrays or shapes.
        jaxpr: Its trace.
        in_shardings: Of each argument, None where unknown.
        weights: Path of each argument that is a weight, None of the others.
        out_shardings: Of each result; None where the compiler chooses.
        donated: Positions of the arguments whose memory may be reused.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    jaxpr: ClosedJaxpr
    in_shardings: tuple[Sharding | None, ...]
    weights: tuple[str | None, ...]
    out_shardings: tuple[Sharding | None, ...] | None = None
    donated: tuple[int, ...] = ()

    def jitted(self) -> Any:
        """Return the function, jitted with its shardings and donations."""
        outs = None if self.out_shardings is None else list(self.out_shardings)
        return jax.jit(
            self.function,
            in_shardings=self.in_shardings,
            out_shardings=outs,
            donate_argnums=self.donated,
        )


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    """Return its shape, with its sharding if that is on a mesh."""
    sharding = getattr(array, "sharding", None)
    return jax.ShapeDtypeStruct(
        array.shape,
        array.dtype,
        sharding=sharding if isinstance(sharding, NamedSharding) else None,
    )


def make_subject(
    function: Any,
    arguments: tuple[Any, ...],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    platform: str | None = None,
    devices_per_host: int | None = None,
) -> Subject:
    """Make the subject of any function, or of a training step.

    Args:
        function: A training step, a jitted function, or one to be jitted.
        arguments: Its arguments.
        mesh: The mesh; that of `jax.set_mesh` or of an argument's sharding if absent.
        platform: Kind of the absent devices, or None for those of the mesh.
        devices_per_host: Absent devices of a host; None if unknown.

    Raises:
        InputError: There is no mesh to be found, a step without a batch or with a
            mesh besides its own, or a mesh without devices and no platform.
    """
    if hasattr(function, "audit_subject"):
        if mesh is not None:
            raise InputError(
                "a training step has its own mesh; leave mesh= out",
                key="audit.mesh_of_step_given",
            )
        if not arguments:
            raise InputError(
                "a training step is audited with a batch: audit(step, batch), such as "
                "batch_shapes(examples, seq)",
                key="audit.missing_batch",
            )
        return function.audit_subject(
            *arguments, platform=platform, devices_per_host=devices_per_host
        )
    mesh = mesh or _arguments_mesh(arguments)
    if not hasattr(function, "lower"):
        function = jax.jit(function)
    return Subject(
        function=function,
        arguments=arguments,
        mesh=mesh,
        platform=platform or mesh_platform(mesh),
    )


def _arguments_mesh(arguments: tuple[Any, ...]) -> Mesh | AbstractMesh:
    for leaf in jax.tree.leaves(arguments):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        return mesh
    raise InputError(
        "audit finds no mesh to name collectives by: give mesh=, call it inside `with "
        "jax.set_mesh(mesh):`, or give arguments a NamedSharding",
        key="audit.no_mesh",
    )
