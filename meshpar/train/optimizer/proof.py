"""Proof that an optimizer run by layer does what it does to layers as parameters.

Layers as parameters of their own are what an optimizer is written for. Its trace on
such a tree, of two layers, is compared with the trace on one layer as it is run for
several: every output must be computed by the same operations of the same inputs. So an
optimizer that counts parameters, or draws other random numbers for each, is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.tree_util import DictKey

from meshpar.parallel.matrices import OnMatrices
from meshpar.rules.sharding import path_name
from meshpar.train.optimizer.flow import (
    NotByLayer,
    Slot,
    Traced,
    Value,
    check_owner,
    run,
    single_owner,
    traced,
)

NUM_LAYERS = 2
"""Layers that a stacked parameter has in the proof."""

_Digests = dict[tuple[str, int | None], str]
"""(Path, layer) -> digest of what computes the array; no layer where there is none."""


def by_layer_refusal(
    optimizer: optax.GradientTransformation,
    params: Any,
    trace: Traced,
    stacked: Collection[str],
) -> str | None:
    """Return the reason why an optimizer cannot be run by layer; None if it can.

    Args:
        optimizer: The optimizer.
        params: Shapes, one layer's of each stacked parameter.
        trace: Its trace on them.
        stacked: Paths of the stacked parameters.
    """
    try:
        found = _output_digests(trace, frozenset(stacked))
    except NotByLayer as reason:
        return str(reason)
    slots: list[Slot] = []
    for path, _ in jax.tree.leaves_with_path(params):
        name = path_name(path)
        layers = range(NUM_LAYERS) if name in stacked else (None,)
        slots += (Slot(name, name, layer) for layer in layers)
    reasons = []
    for unrolled in _UNROLLED:
        try:
            tree = unrolled(params, stacked)
            wanted = _output_digests(traced(optimizer, tree, slots), frozenset())
        except NotByLayer as reason:
            reasons.append(str(reason))
        except Exception as error:  # whatever the optimizer raises is the reason
            reasons.append(
                "on a tree in which layers are parameters of their own it raises "
                f"{type(error).__name__}: {error}"
            )
        else:
            if found == wanted:
                return None
            reasons.append(_difference(found, wanted))
    return reasons[0]


def _output_digests(trace: Traced, stacked: frozenset[str]) -> _Digests:
    """Return the digests of all outputs of both functions of an optimizer."""
    state = _renamed(trace.state, "state ")
    gradients = _renamed(trace.params, "gradient ")
    params = _renamed(trace.params, "parameter ")
    first, updates = _renamed(trace.state, "the first "), "the update of "
    digests: _Digests = {}
    for program, inputs, outputs in (
        (trace.init, params, first),
        (
            trace.update,
            (*gradients, *state, *params, Slot("loss", None)),
            (*_renamed(trace.params, updates), *state),
        ),
    ):
        given = [_input(slot, stacked) for slot in inputs]
        values = run(program, given, _Formulas(stacked))
        for slot, value in zip(outputs, values, strict=True):
            check_owner(slot, value, stacked)
            if slot.owner in stacked:
                for layer in range(NUM_LAYERS):
                    digests[slot.path, layer] = _at(value.content, layer)
            else:
                digests[slot.path, slot.layer] = value.content
    return digests


def _renamed(slots: Sequence[Slot], prefix: str) -> tuple[Slot, ...]:
    return tuple(Slot(prefix + one.path, one.owner, one.layer) for one in slots)


def _input(slot: Slot, stacked: frozenset[str]) -> Value:
    if slot.owner in stacked:
        layers = tuple(f"{slot.path} {layer}" for layer in range(NUM_LAYERS))
        return Value(slot.owner, layers)
    if slot.layer is None:
        return Value(slot.owner, slot.path)
    return Value(f"{slot.owner} {slot.layer}", f"{slot.path} {slot.layer}")


def _difference(found: _Digests, wanted: _Digests) -> str:
    if found.keys() != wanted.keys():
        return "its state has other arrays where layers are parameters of their own"
    path = next(
        path for path, layer in found if found[path, layer] != wanted[path, layer]
    )
    return (
        f"{path} is computed otherwise where layers are parameters of their own: it "
        "counts them, adds up those of one parameter alone, or draws other random "
        "numbers for each"
    )


@dataclass(frozen=True)
class _Formulas:
    """The domain of digests: one for each layer of a stacked parameter, or one.

    Equal digests are of the same operations on the same inputs, but for the order in
    which sums over several parameters are taken.
    """

    stacked: frozenset[str]

    def constant(self, value: Any) -> str:
        return _digest(_described(value))

    def apply(self, equation: JaxprEqn, operands: Sequence[Value]) -> list[Any]:
        what = equation.primitive.name, _described(equation.params)
        results = range(len(equation.outvars))

        def at(layer: int) -> list[str]:
            inputs = [_at(one.content, layer) for one in operands]
            return [_digest(*what, *inputs, str(number)) for number in results]

        if not any(one.owner in self.stacked for one in operands):
            return at(0)
        return list(zip(*map(at, range(NUM_LAYERS)), strict=True))

    def total(self, name: str, terms: Sequence[Value]) -> str:
        digests: list[str] = []
        for term in terms:
            one = term.content
            digests += one if isinstance(one, tuple) else (one,)
        return _digest("total", name, *sorted(digests))

    def choose(
        self, index: Value, inputs: Sequence[Value], branches: Sequence[ClosedJaxpr]
    ) -> list[Value]:
        by_branch = [run(branch, inputs, self) for branch in branches]
        results = []
        for options in zip(*by_branch, strict=True):
            owner = single_owner("cond", options)
            layers = tuple(
                _digest(
                    "cond", index.content, *(_at(one.content, at) for one in options)
                )
                for at in range(NUM_LAYERS)
            )
            results.append(Value(owner, layers if owner in self.stacked else layers[0]))
        return results

    def on_matrices(
        self,
        operations: Sequence[OnMatrices],
        arrays: Sequence[Value],
        shared: Sequence[Value],
    ) -> list[Any]:
        others = [one.content for one in shared]

        def result(operation: OnMatrices, digest: str) -> str:
            return _digest("on_matrices", repr(operation), digest, *others)

        return [
            tuple(result(operation, digest) for digest in one.content)
            if one.owner in self.stacked
            else result(operation, one.content)
            for operation, one in zip(operations, arrays, strict=True)
        ]


def _at(content: Any, layer: int) -> str:
    return content[layer] if isinstance(content, tuple) else content


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _described(value: Any) -> str:
    """Return a text that is the same for the same parameter of a primitive."""
    if isinstance(value, dict):
        return _described(tuple(sorted(value.items())))
    if isinstance(value, tuple | list):
        return f"({','.join(map(_described, value))})"
    if isinstance(value, ClosedJaxpr):
        return f"{value.jaxpr} {_described(value.consts)}"
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return f"{value.dtype} {_described(jax.random.key_data(value))}"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        content = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        return f"{array.dtype} {array.shape} {content}"
    return repr(value)


@jax.tree_util.register_pytree_with_keys_class
class _Children:
    """A node of a tree whose children may have equal keys."""

    def __init__(self, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.keys, self.values = keys, values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        keys = (DictKey(key) for key in self.keys)
        return list(zip(keys, self.values, strict=True)), self.keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], values: Any) -> _Children:
        return cls(keys, tuple(values))


def _layers_below(params: Any, stacked: Collection[str]) -> Any:
    """Put the layers in the place of the leaf: masks made beforehand still fit.

    A path's last key occurs twice in it, so that it says what it said.
    """

    def layers(path: tuple, leaf: Any) -> Any:
        if path_name(path) not in stacked:
            return leaf
        return _Children((path[-1].key,) * NUM_LAYERS, (leaf,) * NUM_LAYERS)

    return jax.tree.map_with_path(layers, params)


def _layers_side_by_side(params: Any, stacked: Collection[str]) -> Any:
    """Repeat the leaf in its node: every path is what it was."""

    def node(tree: Any, path: tuple[DictKey, ...]) -> Any:
        if not isinstance(tree, dict):
            return tree
        children = []
        for key in sorted(tree):
            inner = (*path, DictKey(key))
            copies = NUM_LAYERS if path_name(inner) in stacked else 1
            children += [(key, node(tree[key], inner))] * copies
        keys, values = zip(*children, strict=True) if children else ((), ())
        return _Children(keys, values)

    return node(params, ())


_UNROLLED: tuple[Callable[[Any, Collection[str]], Any], ...] = (
    _layers_below,
    _layers_side_by_side,
)
"""Trees in which layers are parameters of their own, by the paths that users know."""
