"""Build a Flax NNX module under a trace, twice, and describe its arrays.

Every layer is built by the program that was traced once. So whatever a builder takes
from elsewhere (NumPy's random numbers, a counter, a module made before) would be the
same in all layers, or untied in each. It shows where two builds differ, or share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from meshpar.errors import InputError
from meshpar.model.nnx_checks import check_array, check_builder, check_module
from meshpar.trace.dependence import Numbers, numbers_in, same_numbers

Builder = Callable[[nnx.Rngs], nnx.Module]


@dataclass(frozen=True)
class Built:
    """A module that a builder makes, without values.

    Args:
        kind: The module's class.
        what: The argument of `from_nnx` that gave the builder, in words.
        graph: Graph definition of the module, without its arrays.
        leaves: Its arrays.
        batch_norms: Paths of its `nnx.BatchNorm`s.
        rescaled: Paths of parameters that Flax's `WeightNorm` and `SpectralNorm` put
            their scaled values in place of, before each use anew.
        given: Path -> each `nnx.Param` that existed before the module was built.
    """

    kind: type
    what: str
    graph: Any
    leaves: tuple[Leaf, ...]
    batch_norms: frozenset[str]
    rescaled: frozenset[str]
    given: Mapping[str, nnx.Param]


@dataclass(frozen=True)
class _Trace:
    """One traced build; `numbers` are the operations and constants of each array."""

    kind: type
    graph: Any
    leaves: list[tuple[tuple, Any]]
    shapes: list[Any]
    numbers: list[Numbers]
    nodes: dict[str, Any]


def build(builder: Builder, key: jax.Array) -> nnx.Module:
    """Return the module that a builder makes from `nnx.Rngs(key)`."""
    with nnx.use_eager_sharding(False):
        module = builder(nnx.Rngs(key))
    # Flax takes an array that is being traced for a static attribute.
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
    return module


def built(builder: Builder, argument: str) -> Built:
    """Trace a builder twice, and return its module if both builds are equal.

    Args:
        builder: Builds a module.
        argument: Argument of `from_nnx` that gave it.

    Raises:
        InputError: The builder takes no `nnx.Rngs` alone, builds no module, or other
            ones from the same key; or the module holds a random key of its own, or two
            arrays of one name.
    """
    check_builder(builder, argument)
    first, second = (_traced(builder, argument) for _ in range(2))
    what = f"from_nnx({argument}={first.kind.__name__})"
    _check_alike(what, first, second)
    leaves = tuple(
        traced_leaf(path, leaf, shape, what)
        for (path, leaf), shape in zip(first.leaves, first.shapes, strict=True)
    )
    _check_names(what, leaves)
    return Built(
        kind=first.kind,
        what=what,
        graph=first.graph,
        leaves=leaves,
        batch_norms=frozenset(
            path
            for path, node in first.nodes.items()
            if isinstance(node, nnx.BatchNorm)
        ),
        rescaled=_rescaled(first.nodes),
        given={
            path: node
            for path, node in first.nodes.items()
            if isinstance(node, nnx.Param) and node is second.nodes[path]
        },
    )


def check_untied(
    num_layers: Mapping[str, int | None], made: Mapping[str, Built]
) -> None:
    """Raise if several layers, or builders, take a parameter from outside.

    Args:
        num_layers: Name of a group, or of the ends -> its layers, None for the ends.
        made: The built modules, by the same names.

    Raises:
        InputError: Each would train a copy of its own.
    """
    seen: dict[int, str] = {}
    for name, one in made.items():
        for path, param in one.given.items():
            if (num_layers[name] or 1) > 1:
                raise InputError(
                    f"{one.what}: {path!r} is one nnx.Param that was made before the "
                    "block is built; each layer would train a copy of its own: make it "
                    "in the block, or as an nnx.Variable if nothing trains it",
                    key="model.param_shared_by_layers",
                )
            if id(param) in seen:
                raise InputError(
                    f"{one.what}: {path!r} is {seen[id(param)]} too, one nnx.Param "
                    "that was made before; each would train a copy of its own: build "
                    "it in the ends, and let embed put its result into the stream",
                    key="model.param_shared_by_builders",
                )
            seen[id(param)] = f"{path!r} of {one.what}"


def _traced(builder: Builder, argument: str) -> _Trace:
    found: list[Any] = []

    def arrays(key: jax.Array) -> list[Any]:
        try:
            module = build(builder, key)
        except TraceContextError as error:
            raise InputError(
                f"from_nnx({argument}=...): the builder changes what was made before "
                "it runs, such as an nnx.Rngs; use the nnx.Rngs that it is given",
                key="model.builder_changes_outside",
            ) from error
        check_module(module, argument)
        graph, state = nnx.split(module)
        leaves = list(nnx.to_flat_state(state))
        for path, leaf in leaves:
            check_array(leaf_value(leaf), argument, leaf_name(path))
        found.extend((module, graph, leaves))
        return [leaf_value(leaf) for _, leaf in leaves]

    # A shape alone: a key would start JAX, after which devices can't be emulated.
    key = jax.eval_shape(jax.random.key, 0)
    program, shapes = jax.make_jaxpr(arrays, return_shape=True)(key)
    module, graph, leaves = found
    nodes = {leaf_name(path): node for path, node in nnx.iter_graph(module)}
    return _Trace(type(module), graph, leaves, shapes, numbers_in(program), nodes)


def _rescaled(nodes: Mapping[str, Any]) -> frozenset[str]:
    inside = {
        id(node)
        for norm in nodes.values()
        if isinstance(norm, nnx.WeightNorm | nnx.SpectralNorm)
        for _, node in nnx.iter_graph(norm.layer_instance)
    }
    return frozenset(
        path
        for path, node in nodes.items()
        if isinstance(node, nnx.Param) and id(node) in inside
    )


def _check_alike(what: str, first: _Trace, second: _Trace) -> None:
    one, other = map(_description, (first, second))
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            raise InputError(
                f"{what}: two builds from one key differ in {name!r}: "
                f"{one.get(name, 'nothing')}, then {other.get(name, 'nothing')}; a "
                "block is built once for all layers: take what differs from "
                "scope.layer, or give each kind a group of its own (groups=)",
                key="model.builds_differ",
            )
    for (path, _), *numbers in zip(
        first.leaves, first.numbers, second.numbers, strict=True
    ):
        if not same_numbers(*numbers):
            raise InputError(
                f"{what}: two builds from one key give {leaf_name(path)!r} other "
                "values, as NumPy's random numbers or a counter do; draw from the "
                "nnx.Rngs that the builder is given, such as rngs.params()",
                key="model.builds_differ_in_values",
            )


def _description(trace: _Trace) -> dict[str, str]:
    """Return a module's settings, and its arrays' kinds and shapes, as text by path."""
    plain = bool | int | float | complex | str | bytes | np.generic | np.dtype | None
    settings = {
        name: repr(node)
        if isinstance(node, plain)
        else str(getattr(node, "__qualname__", type(node).__qualname__))
        for name, node in trace.nodes.items()
        if "_pytree__" not in name
        and not isinstance(node, nnx.Variable | jax.Array | np.ndarray)
    }
    arrays = {
        leaf_name(path): f"{type(leaf).__name__} of {shape.dtype}{shape.shape}"
        for (path, leaf), shape in zip(trace.leaves, trace.shapes, strict=True)
    }
    return settings | arrays


def _check_names(what: str, leaves: tuple[Leaf, ...]) -> None:
    seen: dict[str, tuple] = {}
    for leaf in leaves:
        if leaf.name in seen:
            raise InputError(
                f"{what}: two arrays have the name {leaf.name!r}, at "
                f"{seen[leaf.name]} and {leaf.path}; rename one",
                key="model.duplicate_array_name",
            )
        seen[leaf.name] = leaf.path


@dataclass(frozen=True)
class Leaf:
    """One array of a module.

    Args:
        path: Its keys in the module.
        template: Its variable; None for an array without one.
        role: `param`, `constant` (of integers or booleans), `state`, `random` or
            `fixed`, a NumPy array that every build has alike.
        value: Shape and dtype, or the NumPy array itself if it is `fixed`.
    """

    path: tuple
    template: nnx.Variable | None
    role: str
    value: Any

    @property
    def name(self) -> str:
        """Path as text, such as `attention.query.kernel`."""
        return leaf_name(self.path)

    @property
    def initial(self) -> jax.Array:
        """Zeros in place of a random stream's key or count, which no method may use.

        They are made on use: an array made while the module is built starts JAX.
        """
        return jnp.zeros(self.value.shape, self.value.dtype)


def leaf_name(path: tuple) -> str:
    """Return the keys of an array as one name, such as `attention.query.kernel`."""
    return ".".join(map(str, path))


def traced_leaf(path: tuple, leaf: Any, shape: Any, what: str) -> Leaf:
    """Return the description of one array of a traced module.

    Args:
        path: Its keys in the module.
        leaf: The variable, or the array.
        shape: Its shape and dtype.
        what: The argument of `from_nnx`, in words.

    Raises:
        InputError: It is a random key.
    """
    template = leaf.replace(None) if isinstance(leaf, nnx.Variable) else None
    if isinstance(leaf, nnx.RngState):
        return Leaf(path, template, "random", shape)
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        raise InputError(
            f"{what}: the module holds a random key {leaf_name(path)!r} of its own; "
            "draw with scope.dropout or scope.key, which every layout does alike",
            key="model.own_random_key",
        )
    if isinstance(leaf, np.ndarray):
        return Leaf(path, None, "fixed", leaf)
    if not isinstance(leaf, nnx.Param):
        return Leaf(path, template, "state", shape)
    role = "param" if jnp.issubdtype(shape.dtype, jnp.inexact) else "constant"
    return Leaf(path, template, role, shape)


def in_full(template: nnx.Variable | None) -> bool:
    """Return True if a variable was made with `in_full=True` (`Parameter`)."""
    return template is not None and bool(template.get_metadata().get("in_full", False))


def leaf_value(leaf: Any) -> Any:
    """Return the array of a variable, or the array itself."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
