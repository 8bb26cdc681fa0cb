"""Rules applied to trees: shardings of parameters, and arrays born in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from meshpar.errors import InputError
from meshpar.rules.rules import Rules, is_axes


def tree_shardings(tree: Any, axes: Any, mesh: Mesh, rules: Rules) -> Any:
    """Return a sharding for every array of a plain pytree of parameters.

    Args:
        tree: Arrays or `jax.ShapeDtypeStruct`s.
        axes: The same tree, a tuple of logical axes in each array's place.
        mesh: Where they will lie.
        rules: How; those for stored parameters are taken.

    Raises:
        InputError: Arguments of other kinds, or in another order.
        RuleError: An array cannot be laid out; its path is in the message.

    Example:
        >>> import jax.numpy as jnp
        >>> from meshpar import DATA_PARALLEL, Layout, make_mesh
        >>> mesh = make_mesh(Layout(data=-1))
        >>> shardings = tree_shardings(
        ...     {"w": jnp.zeros((4, 8))}, {"w": ("embed", "mlp")}, mesh, DATA_PARALLEL)
        >>> tuple(shardings["w"].spec)
        (None, None)
    """
    _check_kinds(mesh, rules)
    stored = rules.stored

    def sharding(path: tuple, array: Any, names: Any) -> Any:
        _check_axes(path_name(path), array, names)
        return stored.sharding(mesh, names, array.shape, path=path_name(path))

    return jax.tree.map_with_path(
        sharding, tree, axes, is_leaf=lambda node: is_axes(node) and len(node) > 0
    )


def nnx_shardings(module: nnx.Module, mesh: Mesh, rules: Rules) -> Any:
    """Return a sharding for every parameter of a Flax NNX module, from its metadata.

    Args:
        module: A module, real or from `nnx.eval_shape`.
        mesh: Where its parameters will lie.
        rules: How; those for stored parameters are taken.

    Returns:
        A nested dict like `nnx.to_pure_dict(nnx.state(module, nnx.Param))`.

    Raises:
        RuleError: A parameter cannot be laid out; its path is in the message.
    """
    values = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return tree_shardings(values, logical_axes(module), mesh, rules)


def born_sharded(
    create: Callable[..., Any],
    shardings: Any,
    *,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return `create` jitted so that its arrays are created in their shards.

    Args:
        create: Makes a tree of arrays.
        shardings: The same tree, a sharding in each array's place.
        compiler_options: XLA's options, as `jax.jit` takes them.
    """
    options = None if compiler_options is None else dict(compiler_options)
    return jax.jit(create, out_shardings=shardings, compiler_options=options)


def _check_kinds(mesh: Any, rules: Any) -> None:
    for name, given, kind in (("mesh", mesh, Mesh), ("rules", rules, Rules)):
        if not isinstance(given, kind):
            raise InputError(
                f"{name} is a {type(given).__name__}, but must be a {kind.__name__}; "
                "the order is tree_shardings(tree, axes, mesh, rules)",
                key="rules.misplaced_argument",
            )


def _check_axes(path: str, array: Any, names: Any) -> None:
    if not hasattr(array, "shape") or not is_axes(names):
        raise InputError(
            f"{path or 'the tree'} is a {type(array).__name__} with logical axes that "
            f"are a {type(names).__name__}; give an array, or its shape, and a tuple "
            "with a name or None for each dim: tree_shardings(tree, axes, mesh, rules)",
            key="rules.array_without_axes",
        )


def logical_axes(module: nnx.Module) -> dict[str, Any]:
    """Return the sharding metadata of a module: a name, or None, per dim."""
    state = nnx.state(module, nnx.Param)
    tree: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        insert(tree, path, variable_axes(variable, len(variable.shape)))
    return tree


def variable_axes(
    variable: nnx.Variable | None, num_dims: int
) -> tuple[str | None, ...]:
    """Return the logical axis, or None, of each dim of a variable, from its metadata.

    Args:
        variable: It; None for an array that stands by itself.
        num_dims: Of its array.
    """
    names = None if variable is None else variable.get_metadata().get("out_sharding")
    return (None,) * num_dims if names is None else tuple(names)


def insert(tree: dict[str, Any], path: tuple, leaf: Any) -> None:
    """Put a leaf at a path of a nested dict."""
    *parents, last = path
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = leaf


def path_name(path: tuple) -> str:
    """Return a tree path as users read it: `blocks.mlp.down`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
