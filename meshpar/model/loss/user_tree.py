"""A user's own pytree of parameters, taken apart into named arrays and put together.

Flax NNX modules, Linen variables, Equinox modules, Haiku and plain dicts: `init(key)`
is traced once; what it holds besides arrays (functions, flags, structure) is kept.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from meshpar.errors import InputError
from meshpar.rules.rules import LogicalAxes
from meshpar.rules.sharding import variable_axes

LINEN_PARAMS = "params"
"""The collection of Linen variables that is trained."""


@dataclass(frozen=True)
class UserLeaf:
    """One array of a user's tree.

    Args:
        path: Names of its keys, such as ("layers", "0", "kernel").
        shape: Its shape.
        dtype: Its dtype.
        role: `param`; `state`, which is not trained; `constant`, integers and booleans
            among the parameters; or `random`, a key or count of a module's own stream.
        logical_axes: Names that the module gives its dims; None where it gives none.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    role: str
    logical_axes: LogicalAxes | None

    @property
    def name(self) -> str:
        """Path as text, such as `layers.0.kernel`."""
        return ".".join(self.path)


class UserTree:
    """The tree that `init(key)` returns, without its values.

    Attributes:
        leaves: Its arrays.
        collections: Linen's collections of variables that are not trained.
        numbers: Paths of Python numbers, which are not trained either.
        has_statistics: True if an NNX module in it has an `nnx.BatchNorm`.

    Args:
        init: Makes it.

    Raises:
        InputError: It cannot be traced, or returns no array to train.
    """

    def __init__(self, init: Callable[[jax.Array], Any]) -> None:
        self._init = init
        self._templates: list[Any] = []
        self._structure: Any = None
        self.collections: set[str] = set()
        self.numbers: set[str] = set()

        def traced(key: jax.Array) -> list[Any]:
            pairs = self._take_apart(self._made(key))
            self._traced_leaves = [leaf for leaf, _ in pairs]
            self.has_statistics = any(
                isinstance(part, _Module) and part.has_batch_norm
                for part in self._templates
            )
            return [_raw(leaf, value) for leaf, value in pairs]

        if not callable(init):
            raise InputError(
                f"init is a {type(init).__name__}; give a function of a key that "
                "returns the parameters, such as lambda key: MyModel(nnx.Rngs(key))",
                key="model.init_not_callable",
            )
        jax.eval_shape(traced, jax.eval_shape(lambda: jax.random.key(0)))
        self.leaves: tuple[UserLeaf, ...] = tuple(self._traced_leaves)
        if not any(leaf.role == "param" for leaf in self.leaves):
            raise InputError(
                "init returns no array of real numbers to train; return the "
                "parameters: a pytree of arrays, or a module",
                key="model.no_parameters",
            )

    def values(self, key: jax.Array) -> list[jax.Array]:
        """Return the array of each leaf, as `init(key)` makes it; 0 for random ones."""
        return [_raw(leaf, value) for leaf, value in self._take_apart(self._made(key))]

    def _made(self, key: jax.Array) -> Any:
        # Logical axes are no mesh axes, which Flax would look for.
        with nnx.use_eager_sharding(False):
            return self._init(key)

    def rebuild(
        self,
        values: Sequence[Any],
        key: jax.Array | None,
        *,
        training: bool,
        batch_axes: tuple[str, ...] | None = None,
    ) -> Any:
        """Return the user's tree with these arrays.

        Args:
            values: One for each leaf; those of random ones are not read.
            key: What keys of a module's own streams derive from; None outside training.
            training: Whether dropout and the like are active.
            batch_axes: Manual mesh axes that split the batch, over which a training
                `nnx.BatchNorm` takes its statistics; None where none may be.
        """
        given = iter(zip(self.leaves, values, strict=True))
        nodes = []
        for template in self._templates:
            if isinstance(template, _Module):
                module = template.merged(given, key)
                _set_mode(module, training, batch_axes)
                nodes.append(module)
            elif isinstance(template, _Array):
                nodes.append(template.filled(_random(*next(given), key)))
            else:
                nodes.append(template)
        tree = jax.tree.unflatten(self._structure, nodes)
        equinox = sys.modules.get("equinox")
        if equinox is not None and not training:
            tree = equinox.nn.inference_mode(tree)
        return tree

    def statistics(self, tree: Any) -> dict[str, jax.Array]:
        """Return the running statistics of every training `nnx.BatchNorm`, by name.

        Args:
            tree: From `rebuild`, after the loss used it.
        """
        statistics: dict[str, jax.Array] = {}
        for path, node in jax.tree.leaves_with_path(tree, is_leaf=_is_node):
            if isinstance(node, nnx.Module):
                start = tuple(map(_key_name, path))
                statistics |= {
                    ".".join((*start, *map(str, at), name)): getattr(module, name)[...]
                    for at, module in nnx.iter_graph(node)
                    if isinstance(module, nnx.BatchNorm)
                    and not module.use_running_average
                    for name in ("mean", "var")
                }
        return statistics

    def _take_apart(self, tree: Any) -> list[tuple[UserLeaf, Any]]:
        """Return leaves and values; keep the structure and what is no array."""
        paths, self._structure = jax.tree.flatten_with_path(tree, is_leaf=_is_node)
        _check_variables(node for _, node in paths)
        self.collections, self.numbers = set(), set()
        leaves: list[tuple[UserLeaf, Any]] = []
        self._templates = []
        for keys, node in paths:
            path = tuple(map(_key_name, keys))
            collection = _untrained_collection(tree, keys)
            self.collections.update(() if collection is None else (collection,))
            trained = collection is None
            if isinstance(node, float) and isinstance(tree, Mapping | list | tuple):
                self.numbers.add(".".join(path))
            template = _template(node)
            self._templates.append(template)
            if isinstance(template, _Module | _Array):
                leaves += template.taken_apart(path, node, trained)
        return leaves


@dataclass(frozen=True)
class _Array:
    """An array, or a Linen box with one."""

    box: Any

    def taken_apart(self, path: tuple[str, ...], node: Any, trained: bool) -> list:
        is_boxed = isinstance(node, linen.meta.AxisMetadata)
        value = jnp.asarray(node.unbox() if is_boxed else node)
        names = getattr(node, "names", None)
        role = _role(value.dtype, trained)
        axes = None if names is None else tuple(names)
        path = path or ("value",)  # The tree is this array alone.
        return [(UserLeaf(path, value.shape, value.dtype, role, axes), value)]

    def filled(self, value: Any) -> Any:
        return value if self.box is None else self.box.replace_boxed(value)


@dataclass(frozen=True)
class _Module:
    """A module of Flax NNX: its graph, and a template of each variable."""

    graph: Any
    variables: tuple[tuple[tuple, Any], ...]
    has_batch_norm: bool

    @classmethod
    def split(cls, module: Any) -> _Module:
        graph, state = nnx.split(module)
        variables = tuple(
            (path, entry.replace(None) if isinstance(entry, nnx.Variable) else None)
            for path, entry in nnx.to_flat_state(state)
        )
        has_batch_norm = any(
            isinstance(node, nnx.BatchNorm) for _, node in nnx.iter_graph(module)
        )
        return cls(graph, variables, has_batch_norm)

    def taken_apart(self, path: tuple[str, ...], node: Any, trained: bool) -> list:
        leaves = []
        for keys, entry in nnx.to_flat_state(nnx.split(node)[1]):
            variable = entry if isinstance(entry, nnx.Variable) else None
            value = entry if variable is None else variable.get_value()
            is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            value = value if is_key else jnp.asarray(value)
            role = _role(value.dtype, trained and isinstance(entry, nnx.Param))
            if isinstance(entry, nnx.RngState):
                role = "random"
            axes = variable_axes(variable, value.ndim)
            named = axes if any(axes) else None
            full = (*path, *map(str, keys))
            leaf = UserLeaf(full, value.shape, value.dtype, role, named)
            leaves.append((leaf, value))
        return leaves

    def merged(self, given: Any, key: jax.Array | None) -> Any:
        leaves = []
        for (path, variable), (leaf, value) in zip(self.variables, given, strict=False):
            filled = _random(leaf, value, key)
            leaves.append(
                (path, filled if variable is None else variable.replace(filled))
            )
        with nnx.use_eager_sharding(False):
            return nnx.merge(self.graph, nnx.from_flat_state(leaves))


def _set_mode(
    module: nnx.Module, training: bool, batch_axes: tuple[str, ...] | None
) -> None:
    """Put a module in its mode, its `nnx.BatchNorm`s over the global batch."""
    if not training:
        module.eval()
        return
    for path, norm in nnx.iter_graph(module):
        if not isinstance(norm, nnx.BatchNorm) or norm.use_running_average:
            continue
        if batch_axes is None:
            raise InputError(
                f"{'.'.join(map(str, path))} is an nnx.BatchNorm in training, whose "
                "statistics are the global batch's, and from_loss is given blocks; "
                "leave blocks= out, or write the model with meshpar.from_nnx",
                key="model.batch_norm_in_blocks",
            )
        # Flax hands the name on to JAX, which takes several.
        norm.axis_name = cast(Any, batch_axes or None)


def _template(node: Any) -> Any:
    if isinstance(node, nnx.Module):
        return _Module.split(node)
    if isinstance(node, linen.meta.AxisMetadata):
        return _Array(node.replace_boxed(None))
    is_array = isinstance(node, jax.Array | np.ndarray | np.generic)
    return _Array(None) if is_array else node


def _is_node(node: Any) -> bool:
    return isinstance(node, nnx.Module | nnx.Variable | linen.meta.AxisMetadata)


def _check_variables(nodes: Iterable[Any]) -> None:
    """Refuse variables of Flax NNX outside a module, or in two modules."""
    seen: set[int] = set()
    for node in nodes:
        if isinstance(node, nnx.Variable):
            raise InputError(
                f"init returns an {type(node).__name__} outside its module, such as "
                "nnx.state gives; return the module, or plain arrays",
                key="model.variables_without_module",
            )
        if isinstance(node, nnx.Module):
            parts = [part for _, part in nnx.iter_graph(node)]
            inside = {id(part) for part in parts if isinstance(part, nnx.Variable)}
            if inside & seen:
                raise InputError(
                    "init returns two modules that share a variable, which would be "
                    "two parameters; put both modules into one nnx.Module",
                    key="model.shared_variable",
                )
            seen |= inside


def _untrained_collection(tree: Any, keys: Sequence[Any]) -> str | None:
    """Return the Linen collection that a path is in, if it is not trained."""
    for key in keys:
        name = getattr(key, "key", None)
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        if LINEN_PARAMS in tree and name != LINEN_PARAMS:
            return str(name)
        tree = tree[name]
    return None


def _role(dtype: Any, trained: bool) -> str:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "random"
    if not trained:
        return "state"
    return "param" if jnp.issubdtype(dtype, jnp.inexact) else "constant"


def _raw(leaf: UserLeaf, value: Any) -> Any:
    return jnp.zeros(leaf.shape, jnp.uint32) if leaf.role == "random" else value


def _random(leaf: UserLeaf, value: Any, key: jax.Array | None) -> Any:
    """Return the value of a leaf; of a random one, from `key`."""
    if leaf.role != "random":
        return value
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape, leaf.dtype)
    key = jax.random.key(0) if key is None else key
    own = jax.random.fold_in(key, zlib.crc32(leaf.name.encode()))
    return jax.random.split(own, leaf.shape) if leaf.shape else own


def _key_name(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)
