"""A Flax NNX module taken apart: its parameters, its state, and pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from meshpar.errors import InputError
from meshpar.model.nnx_checks import (
    check_axes,
    check_builder,
    check_method,
    check_module,
)
from meshpar.model.parameter import Parameter, Params
from meshpar.model.scope import Scope
from meshpar.rules.sharding import axes_of, insert, path_name

_STATISTICS = "batch_norm."
"""Begins the names of the sums that `nnx.BatchNorm` makes, before a state's path."""


@dataclass(frozen=True)
class _Leaf:
    """One array of a module.

    Args:
        path: Keys of where it stands.
        template: Its variable, or None for an array that stands by itself.
        role: `param`, `constant` (of integers or booleans), `state`, `random` or
            `fixed`, a NumPy array that every build has alike.
        value: Shape and dtype, or the NumPy array itself.
    """

    path: tuple
    template: nnx.Variable | None
    role: str
    value: Any

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


class Functional:
    """A module as pure functions of its arrays.

    Args:
        builder: Builds it.
        argument: Of `from_nnx`, that gave the builder.

    Raises:
        InputError: The builder takes no `nnx.Rngs` alone, or builds no module; or that
            holds a random key of its own, or names no logical axis for each dim.
    """

    def __init__(
        self, builder: Callable[[nnx.Rngs], nnx.Module], argument: str
    ) -> None:
        check_builder(builder, argument)
        self._builder = builder
        found: list[Any] = []

        def traced() -> list[Any]:
            module = _build(builder, jax.random.key(0))
            check_module(module, argument)
            graph, state = nnx.split(module)
            leaves = list(nnx.to_flat_state(state))
            found.extend((type(module), graph, leaves))
            return [_value(leaf) for _, leaf in leaves]

        shapes = jax.eval_shape(traced)
        self._type, self._graph, leaves = found
        self.what = f"from_nnx({argument}={self._type.__name__})"
        self._leaves = tuple(
            _leaf(path, leaf, shape, self.what)
            for (path, leaf), shape in zip(leaves, shapes, strict=True)
        )

    def has(self, method: str) -> bool:
        """Whether the module has a method of that name."""
        return hasattr(self._type, method)

    def check_method(self, method: str, *arguments: str) -> None:
        """Refuses a module that lacks a method, or one of other arguments.

        Raises:
            InputError: It does.
        """
        check_method(self._type, self.what, method, arguments)

    def parameters(self, num_layers: int | None) -> Params:
        """Tree of `Parameter`, without those of integers and booleans."""
        return self._tree(("param",), num_layers)

    def state(self, num_layers: int | None) -> Params:
        """Tree of `Parameter` of what is no parameter, or one that has no gradient."""
        return self._tree(("state", "constant"), num_layers)

    @property
    def constants(self) -> tuple[str, ...]:
        """Paths of the parameters of integers and booleans."""
        return tuple(leaf.name for leaf in self._leaves if leaf.role == "constant")

    def build(self, key: jax.Array) -> tuple[Params, Params]:
        """Values of parameters and state as Flax makes them from `nnx.Rngs(key)`."""
        _, state = nnx.split(_build(self._builder, key))
        params: Params = {}
        others: Params = {}
        for leaf, (_, found) in zip(
            self._leaves, nnx.to_flat_state(state), strict=True
        ):
            if leaf.role == "param":
                insert(params, leaf.path, _value(found))
            elif leaf.role in ("state", "constant"):
                insert(others, leaf.path, jnp.asarray(_value(found)))
        return params, others

    def run(self, params: Params, scope: Scope, method: str, *args: Any) -> Any:
        """A method of the module filled with these parameters and the scope's state.

        Raises:
            InputError: It assigns to the module's state, or draws from its streams.
        """
        module, result = self._call(params, scope, method, *args)
        if scope.training:
            for path, _ in self._assigned(module, scope.state):
                raise InputError(
                    f"{self.what}: {method} assigns to {path!r}; state of the ends is "
                    "constant: keep what changes in a block"
                )
        return result

    def run_block(self, params: Params, scope: Scope, stream: Any) -> Any:
        """The module called as a block; statistics of `nnx.BatchNorm` are sums of it.

        Raises:
            InputError: It assigns to state that is of this device's examples alone.
        """
        module, result = self._call(params, scope, "__call__", stream, scope)
        assigned = dict(self._assigned(module, scope.state)) if scope.training else {}
        if not assigned:
            return result
        of_norms = self._batch_norms
        for path in assigned:
            if path.rpartition(".")[0] not in of_norms:
                raise InputError(
                    f"{self.what}: __call__ assigns to {path!r} while it runs, on the "
                    "examples of one device or microbatch; return (x, sums) instead, "
                    "and assign in update_state(self, sums), which gets the global "
                    "batch's"
                )
        if scope.num_microbatches > 1:
            raise InputError(
                f"{self.what} has nnx.BatchNorm {sorted(of_norms)[0]!r}, whose "
                "statistics are the global batch's, but it runs in "
                f"microbatches={scope.num_microbatches}; set microbatches=1, or use a "
                "norm of each example"
            )
        # Every device has them whole: as many shares add up to one.
        share = 1.0 / math.prod(map(lax.axis_size, scope.batch_axes))
        sums = {_STATISTICS + path: value * share for path, value in assigned.items()}
        pair = isinstance(result, tuple) and len(result) == 2
        if pair and isinstance(result[1], dict):  # else a stream of two arrays
            return result[0], {**result[1], **sums}
        return result, sums

    @property
    def changes_state(self) -> bool:
        """Whether a step may change the module's state."""
        return self.has("update_state") or bool(self._batch_norms)

    def update_state(self, params: Params, state: Params, sums: Any) -> Params:
        """State after a step, from sums over the global batch.

        Raises:
            InputError: It assigns to a parameter.
        """
        known: dict[str, Any] = {
            name.removeprefix(_STATISTICS): value
            for name, value in sums.items()
            if name.startswith(_STATISTICS)
        }
        state = jax.tree.map_with_path(
            lambda path, old: cast(Any, known.get(path_name(path), old)).astype(
                old.dtype
            ),
            state,
        )
        if not self.has("update_state"):
            return state
        own = {k: v for k, v in sums.items() if not k.startswith(_STATISTICS)}
        module: Any = self._filled(params, state)
        module.update_state(own)
        assigned = dict(self._assigned(module, state))
        return jax.tree.map_with_path(
            lambda path, old: assigned.get(path_name(path), old), state
        )

    @cached_property
    def _batch_norms(self) -> frozenset[str]:
        """Paths of the module's `nnx.BatchNorm`s."""
        found: list[tuple] = []

        def traced() -> None:
            module = _build(self._builder, jax.random.key(0))
            found.extend(path for path, _ in _norms(module))

        jax.eval_shape(traced)
        return frozenset(".".join(map(str, path)) for path in found)

    def _tree(self, roles: tuple[str, ...], num_layers: int | None) -> Params:
        tree: Params = {}
        for leaf in self._leaves:
            if leaf.role in roles:
                shape = tuple(leaf.value.shape)
                axes = axes_of(leaf.template, len(shape))
                check_axes(self.what, leaf.name, shape, axes)
                parameter = Parameter(
                    shape=shape,
                    dtype=leaf.value.dtype,
                    logical_axes=axes,
                    num_layers=num_layers,
                    in_full=_in_full(leaf.template),
                )
                insert(tree, leaf.path, parameter)
        return tree

    def _call(
        self, params: Params, scope: Scope, method: str, *args: Any
    ) -> tuple[nnx.Module, Any]:
        with nnx.use_eager_sharding(False):
            module = self._filled(params, scope.state)
            for _, norm in _norms(module):
                if scope.batch_sums is not None:
                    scope.batch_sums.append("nnx.BatchNorm")
                # Flax hands the name on to JAX, which takes several.
                norm.axis_name = cast(Any, scope.batch_axes or None)
            result = getattr(module, method)(*args)
        for leaf, value in self._values_of(module):
            if leaf.role == "random" and value is not leaf.value:
                raise InputError(
                    f"{self.what}: {method} draws random numbers from the module's own "
                    f"{leaf.name!r}, the same for every example and step of a layout; "
                    "draw with scope.dropout or scope.key"
                )
        return module, result

    def _filled(self, params: Params, state: Params) -> nnx.Module:
        known = {**_by_path(params), **_by_path(state)}
        leaves = []
        for leaf in self._leaves:
            fixed = leaf.role in ("random", "fixed")
            value = leaf.value if fixed else known[leaf.name]
            filled = value if leaf.template is None else leaf.template.replace(value)
            leaves.append((leaf.path, filled))
        return nnx.merge(self._graph, nnx.from_flat_state(leaves))

    def _values_of(self, module: nnx.Module) -> Iterator[tuple[_Leaf, Any]]:
        found = dict(nnx.to_flat_state(nnx.split(module)[1]))
        for leaf in self._leaves:
            yield leaf, _value(found[leaf.path])

    def _assigned(
        self, module: nnx.Module, state: Params
    ) -> Iterator[tuple[str, jax.Array]]:
        """State that the module has other arrays for than it was filled with."""
        known = _by_path(state)
        for leaf, value in self._values_of(module):
            if leaf.role == "state" and value is not known[leaf.name]:
                yield leaf.name, value


def _build(builder: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> nnx.Module:
    with nnx.use_eager_sharding(False):
        module = builder(nnx.Rngs(key))
    # Flax takes an array that is being traced for a static attribute.
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
    return module


def _leaf(path: tuple, leaf: Any, shape: Any, what: str) -> _Leaf:
    template = leaf.replace(None) if isinstance(leaf, nnx.Variable) else None
    if isinstance(leaf, nnx.RngState):
        value = jax.random.key(0) if isinstance(leaf, nnx.RngKey) else jnp.uint32(0)
        return _Leaf(path, template, "random", value)
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        raise InputError(
            f"{what}: the module holds a random key {'.'.join(map(str, path))!r} of "
            "its own; draw with scope.dropout or scope.key, which every layout does "
            "alike"
        )
    if isinstance(leaf, np.ndarray):
        return _Leaf(path, None, "fixed", leaf)
    if not isinstance(leaf, nnx.Param):
        return _Leaf(path, template, "state", shape)
    role = "param" if jnp.issubdtype(shape.dtype, jnp.inexact) else "constant"
    return _Leaf(path, template, role, shape)


def _in_full(template: nnx.Variable | None) -> bool:
    """Whether a variable was made with `in_full=True` (`Parameter`)."""
    return template is not None and bool(template.get_metadata().get("in_full", False))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _norms(module: nnx.Module) -> Iterator[tuple[tuple, nnx.BatchNorm]]:
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm):
            yield path, node


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): value for path, value in jax.tree.leaves_with_path(tree)}
