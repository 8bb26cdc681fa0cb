"""Trees in which layers are parameters of their own, by the paths that users know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.tree_util import DictKey

from meshpar.rules.sharding import path_name
from meshpar.train.optimizer.formulas import NUM_COPIES
from meshpar.train.optimizer.traced import Slot


@jax.tree_util.register_pytree_with_keys_class
class _Children:
    """A node of the tree whose children may have equal keys."""

    def __init__(self, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.keys, self.values = keys, values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        keys = (DictKey(key) for key in self.keys)
        return list(zip(keys, self.values, strict=True)), self.keys

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], values: Any) -> _Children:
        return cls(keys, tuple(values))


def below_the_leaf(params: Any, stacked: Collection[str]) -> Any:
    """The layers in the place of the leaf: masks made beforehand still fit.

    A path's last key occurs twice in it, so that it tells what it told.

    Args:
        params: Shapes, one layer's of each stacked parameter; nested dicts.
        stacked: Paths of the stacked parameters.
    """

    def layers(path: tuple, leaf: Any) -> Any:
        if path_name(path) not in stacked:
            return leaf
        return _Children((path[-1].key,) * NUM_COPIES, (leaf,) * NUM_COPIES)

    return jax.tree.map_with_path(layers, params)


def beside_the_leaf(params: Any, stacked: Collection[str]) -> Any:
    """The layers beside one another: every path is what it was.

    Args:
        params: As of `below_the_leaf`.
        stacked: As of `below_the_leaf`.
    """

    def node(tree: Any, path: tuple[DictKey, ...]) -> Any:
        if not isinstance(tree, dict):
            return tree
        children = []
        for key in sorted(tree):
            inner = (*path, DictKey(key))
            copies = NUM_COPIES if path_name(inner) in stacked else 1
            children += [(key, node(tree[key], inner))] * copies
        keys, values = zip(*children, strict=True) if children else ((), ())
        return _Children(keys, values)

    return node(params, ())


TREES: tuple[Callable[[Any, Collection[str]], Any], ...] = (
    below_the_leaf,
    beside_the_leaf,
)


def slots_of(params: Any, stacked: Collection[str]) -> list[Slot]:
    """What each leaf of such a tree is.

    Args:
        params: The tree that it was made of.
        stacked: Paths of the stacked parameters.
    """

    def slots() -> Iterator[Slot]:
        for path, _ in jax.tree.leaves_with_path(params):
            name = path_name(path)
            if name in stacked:
                yield from (Slot(name, name, copy) for copy in range(NUM_COPIES))
            else:
                yield Slot(name, name)

    return list(slots())
