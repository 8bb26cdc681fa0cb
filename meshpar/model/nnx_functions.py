"""Split a Flax NNX module into parameters, state and pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshpar.errors import InputError
from meshpar.model.block_run import check_head, is_pair
from meshpar.model.nnx_builds import build, built, in_full, leaf_value
from meshpar.model.nnx_checks import (
    TRACED_NUMBER,
    check_axes,
    check_method,
    traced_number,
)
from meshpar.model.parameter import Parameter, Params
from meshpar.model.scope import Scope
from meshpar.rules.sharding import insert, path_name, variable_axes
from meshpar.trace.dependence import arguments_read, passed_on

_STATISTICS = "batch_norm."
"""Prefix of the names of the sums that `nnx.BatchNorm` makes."""


class Functional:
    """A module as pure functions of its arrays.

    Args:
        builder: Builds it.
        argument: Argument of `from_nnx` that gave the builder.

    Raises:
        InputError: As for `built`; or the module names no logical axis for each dim.
    """

    def __init__(
        self, builder: Callable[[nnx.Rngs], nnx.Module], argument: str
    ) -> None:
        self._builder = builder
        self.built = built(builder, argument)
        self.what = self.built.what
        self._leaves = self.built.leaves
        self._roles = {leaf.name: leaf.role for leaf in self._leaves}

    def has(self, method: str) -> bool:
        """Return True if the module has a method of that name."""
        return hasattr(self.built.kind, method)

    def check_method(self, method: str, *arguments: str) -> None:
        """Raise if the module lacks a method, or has one with other arguments.

        Raises:
            InputError: It does.
        """
        check_method(self.built.kind, self.what, method, arguments)

    def parameters(self, num_layers: int | None) -> Params:
        """Return the tree of `Parameter`, without those of integers and booleans."""
        return self._tree(("param",), num_layers)

    def state(self, num_layers: int | None) -> Params:
        """Return the tree of `Parameter` of state and of integer parameters."""
        return self._tree(("state", "constant"), num_layers)

    @property
    def constants(self) -> tuple[str, ...]:
        """Paths of the parameters of integers and booleans."""
        return tuple(leaf.name for leaf in self._leaves if leaf.role == "constant")

    def check_parameters(self) -> None:
        """Raise if a block has nothing to train.

        Raises:
            InputError: It has no parameter of real numbers, nor state alone.
        """
        roles = {leaf.role for leaf in self._leaves}
        if "param" not in roles and ("constant" in roles or "state" not in roles):
            raise InputError(
                f"{self.what}: the block has no nnx.Param of real numbers; give it "
                "one, or compute what it does in the ends or in another block",
                key="model.block_without_parameters",
            )

    def build(self, key: jax.Array) -> tuple[Params, Params]:
        """Return parameters and state as Flax makes them from `nnx.Rngs(key)`."""
        _, state = nnx.split(build(self._builder, key))
        params: Params = {}
        others: Params = {}
        for leaf, (_, found) in zip(
            self._leaves, nnx.to_flat_state(state), strict=True
        ):
            if leaf.role == "param":
                insert(params, leaf.path, leaf_value(found))
            elif leaf.role in ("state", "constant"):
                insert(others, leaf.path, jnp.asarray(leaf_value(found)))
        return params, others

    def run(self, params: Params, scope: Scope, method: str, *args: Any) -> Any:
        """Return a method's result on these parameters and the scope's state.

        Raises:
            InputError: It assigns to the module's variables, or draws from its streams.
        """
        result, assigned = self._call(params, scope, method, *args)
        for path in assigned:
            raise InputError(
                f"{self.what}: {method} assigns to {path!r}; state of the ends is "
                "constant: keep what changes in a block",
                key="model.ends_assign_state",
            )
        return result

    def run_stream(self, method: str, params: Params, given: Any, scope: Scope) -> Any:
        """Call a method of the ends that makes a stream: `embed`, or one to enter.

        Raises:
            InputError: It returns no stream, or one of different numbers of examples.
        """
        stream = self.run(params, scope, method, given, scope)
        leaves = jax.tree.leaves(stream, is_leaf=lambda leaf: leaf is None)
        if not leaves or not all(getattr(leaf, "ndim", 0) for leaf in leaves):
            raise InputError(
                f"{self.what}: {method} returns {stream!r}; it must return the stream: "
                "an array, or a tree of arrays, with the example first in each",
                key="model.not_a_stream",
            )
        if len({leaf.shape[0] for leaf in leaves}) > 1:
            shapes = jax.tree.map(lambda leaf: leaf.shape, stream)
            raise InputError(
                f"{self.what}: {method} returns a stream of shapes {shapes}; the "
                "example is first in each array of it: broadcast what is the same for "
                "all examples",
                key="model.stream_examples_differ",
            )
        return stream

    def run_head(self, params: Params, stream: Any, batch: Any, scope: Scope) -> Any:
        """Call `head` of the ends, and check the sums that it returns."""
        found = self.run(params, scope, "head", stream, batch, scope)
        sums = check_head(found, f"{self.what}: head")
        return sums if sums.terms else sums[:2]

    def run_block(self, params: Params, stream: Any, scope: Scope) -> Any:
        """Call the module as a block; statistics of `nnx.BatchNorm` are among its sums.

        Raises:
            InputError: It assigns to a parameter, or to state that is of this device's
                examples alone.
        """
        result, assigned = self._call(params, scope, "__call__", stream, scope)
        if not assigned:
            return result
        for path in assigned:
            if not self._is_statistic(path):
                raise InputError(
                    f"{self.what}: __call__ assigns to {path!r} while it runs, on the "
                    "examples of one device or microbatch; return (x, sums) instead, "
                    "and assign in update_state(self, sums), which gets the global "
                    "batch's",
                    key="model.block_assigns_state",
                )
        if scope.num_microbatches > 1:
            raise InputError(
                f"{self.what} has nnx.BatchNorm {min(self.built.batch_norms)!r}, "
                "whose statistics are the global batch's, but it runs in "
                f"microbatches={scope.num_microbatches}; set microbatches=1, or use a "
                "norm of each example",
                key="model.batch_norm_in_microbatches",
            )
        # Every device has the whole statistics: their shares add up to one.
        share = 1.0 / math.prod(map(lax.axis_size, scope.batch_axes))
        sums = {_STATISTICS + path: value * share for path, value in assigned.items()}
        if is_pair(result, stream):
            return result[0], {**result[1], **sums}
        return result, sums

    @property
    def changes_state(self) -> bool:
        """True if a step may change the module's state."""
        return self.has("update_state") or bool(self.built.batch_norms)

    def update_state(self, params: Params, state: Params, sums: Any) -> Params:
        """Return the state after a step, from sums over the global batch.

        Raises:
            InputError: It assigns to a parameter.
        """
        found = {
            name.removeprefix(_STATISTICS): value
            for name, value in sums.items()
            if name.startswith(_STATISTICS)
        }
        state = jax.tree.map_with_path(
            lambda path, old: cast(Any, found.get(path_name(path), old)).astype(
                old.dtype
            ),
            state,
        )
        if not self.has("update_state"):
            return state
        own = {k: v for k, v in sums.items() if not k.startswith(_STATISTICS)}
        known = self._known(params, state)
        _, assigned = self._run(
            known, "update_state", lambda one: one.update_state(own)
        )
        self._check_kept("update_state", assigned)
        return jax.tree.map_with_path(
            lambda path, old: assigned.get(path_name(path), old), state
        )

    def _tree(self, roles: tuple[str, ...], num_layers: int | None) -> Params:
        tree: Params = {}
        for leaf in self._leaves:
            if leaf.role in roles:
                shape = tuple(leaf.value.shape)
                axes = variable_axes(leaf.template, len(shape))
                check_axes(self.what, leaf.name, shape, axes)
                parameter = Parameter(
                    shape=shape,
                    dtype=leaf.value.dtype,
                    logical_axes=axes,
                    num_layers=num_layers,
                    in_full=in_full(leaf.template),
                )
                insert(tree, leaf.path, parameter)
        return tree

    def _call(
        self, params: Params, scope: Scope, method: str, *args: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return a method's result, and the state that it assigned to in training."""

        def called(module: nnx.Module) -> Any:
            for _, norm in nnx.iter_graph(module):
                if isinstance(norm, nnx.BatchNorm):
                    if scope.batch_sums is not None:
                        scope.batch_sums.append("nnx.BatchNorm")
                    # Flax hands the name on to JAX, which takes several.
                    norm.axis_name = cast(Any, scope.batch_axes or None)
            return getattr(module, method)(*args)

        known = self._known(params, scope.state)
        result, assigned = self._run(known, method, called)
        if scope.training:
            self._check_kept(method, assigned)
        return result, assigned if scope.training else {}

    def _run(
        self, known: dict[str, Any], method: str, call: Callable[[Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the result of a call on the module, and the arrays that it replaced.

        Raises:
            InputError: It draws from its streams, or asks for a number while traced.
        """

        def run(known: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            with nnx.use_eager_sharding(False):
                module = self._filled(known)
                try:
                    result = call(module)
                except TRACED_NUMBER as error:
                    raise traced_number(f"{self.what}: {method}", error) from error
            return result, self._values(module)

        result, values = run(known)
        others = {
            name: value
            for name, value in values.items()
            if value is not known[name] and name not in self.built.rescaled
        }
        # `nnx.jit` and `nnx.remat` put every array back, as another object.
        if not all(map(self._is_statistic, others)):
            for name in passed_on(lambda known: run(known)[1], known):
                others.pop(name, None)
        streams = [leaf.name for leaf in self._leaves if leaf.role == "random"]
        drawn = [name for name in streams if name in others]
        if drawn and _matter(run, known, streams):
            raise InputError(
                f"{self.what}: {method} draws random numbers from the module's own "
                f"{drawn[0]!r}, the same for every example and step of a layout; "
                "draw with scope.dropout or scope.key",
                key="model.own_random_stream",
            )
        return result, {k: v for k, v in others.items() if k not in drawn}

    def _check_kept(self, method: str, assigned: dict[str, Any]) -> None:
        for leaf in self._leaves:
            if leaf.role in ("param", "constant") and leaf.name in assigned:
                raise InputError(
                    f"{self.what}: {method} assigns to the nnx.Param {leaf.name!r}, "
                    "which the optimizer alone changes; use the new value without "
                    "assigning it, or keep it in an nnx.Variable that "
                    "update_state(self, sums) assigns to",
                    key="model.assigns_parameter",
                )

    def _is_statistic(self, path: str) -> bool:
        """Return True if an array is a running statistic of an `nnx.BatchNorm`."""
        is_state = self._roles[path] == "state"
        return is_state and path.rpartition(".")[0] in self.built.batch_norms

    def _known(self, params: Params, state: Params) -> dict[str, Any]:
        """Return name -> each array that a call may change."""
        known = {**_by_path(params), **_by_path(state)}
        return {
            leaf.name: leaf.initial if leaf.role == "random" else known[leaf.name]
            for leaf in self._leaves
            if leaf.role != "fixed"
        }

    def _filled(self, known: dict[str, Any]) -> nnx.Module:
        leaves = []
        for leaf in self._leaves:
            value = leaf.value if leaf.role == "fixed" else known[leaf.name]
            filled = value if leaf.template is None else leaf.template.replace(value)
            leaves.append((leaf.path, filled))
        return nnx.merge(self.built.graph, nnx.from_flat_state(leaves))

    def _values(self, module: nnx.Module) -> dict[str, Any]:
        found = dict(nnx.to_flat_state(nnx.split(module)[1]))
        return {
            leaf.name: leaf_value(found[leaf.path])
            for leaf in self._leaves
            if leaf.role != "fixed"
        }


def _matter(
    run: Callable[[dict], tuple[Any, dict]], known: dict[str, Any], names: list[str]
) -> bool:
    """Return True if some arrays may change anything but themselves.

    Flax draws a key for the first carry of an `nnx.RNN` that it does not use.
    """

    def others(arrays: dict[str, Any]) -> Any:
        result, values = run({**known, **arrays})
        return result, {k: v for k, v in values.items() if k not in names}

    return any(arguments_read(others, {name: known[name] for name in names}))


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): value for path, value in jax.tree.leaves_with_path(tree)}
