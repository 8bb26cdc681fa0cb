"""LoRA: a frozen model whose matrices change by products of two thin ones.

    W + alpha / rank * A B,    A (inputs, rank), B (rank, outputs)

A begins at random and B at zero, so that the model begins as it was. The sum is made
layer by layer as the model runs, so every layout, schedule and kernel of the model
works as it is; the backward computes the gradient of the whole sum, as full training
does, and keeps that of A and B. The frozen weights are state (`Model.state`): without
gradient and optimizer state, laid out by the rules, whole over the batch axes.

Reference: Hu et al. 2021, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError, nearest, whole_number
from meshpar.model.block_run import Sums
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.parameter import ENDS, Matrix, Parameter, Params, flat, is_parameter
from meshpar.rules.sharding import insert

TARGETS = ("attention", "mlp")
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which matrices of the blocks change, and by how much room.

    Args:
        rank: Columns of A and rows of B.
        alpha: The product is multiplied by `alpha / rank`.
        targets: Parts of paths, such as `attention`, `mlp.down` or
            `blocks.attention.qkv`: of what they match, each matrix that leads from the
            residual stream or to it. Of routed experts, each has its own A and B.
        frozen_dtype: What the frozen weights are stored in, and those outside the
            blocks used in: `bf16` for a layout with `precision=bf16`. Blocks use theirs
            in the layout's precision.

    Raises:
        InputError: A number is out of its range, or there is no target.

    Example:
        >>> from meshpar.models.presets import build
        >>> model = LoRA(rank=4, targets=("attention.out",)).model(build("test"))
        >>> {path: one.shape for path, one in model.flat_parameters().items()}
        {'blocks.attention.out.a': (4, 8, 4), 'blocks.attention.out.b': (4, 32)}
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        whole_number("rank", self.rank)
        object.__setattr__(self, "targets", tuple(self.targets))
        if not (isinstance(self.alpha, int | float) and 0 < self.alpha < math.inf):
            raise InputError(
                f"alpha={self.alpha!r}: must be a positive number",
                key="value.not_positive",
            )
        if not self.targets:
            raise InputError(
                f"targets=(): name parts of paths, such as {TARGETS}",
                key="model.no_lora_targets",
            )
        if self.frozen_dtype not in _DTYPES:
            raise InputError(
                f"frozen_dtype={self.frozen_dtype!r}: must be 'fp32' or 'bf16'",
                key="model.unknown_frozen_dtype",
            )

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / self.rank

    def model(self, model: Model) -> Model:
        """Return a model whose parameters are A and B, and whose state is frozen.

        Args:
            model: The model to adapt.

        Raises:
            InputError: A target matches nothing that can change.
        """
        factored = self.matrices(model)
        parameters: Params = {group.name: {} for group in model.groups}
        for path, matrix in factored.items():
            for name, factor in _factors(matrix, self.rank).items():
                insert(parameters, (*path.split("."), name), factor)

        def stored(one: Parameter) -> Parameter:
            if one.in_full or not jnp.issubdtype(one.dtype, jnp.floating):
                return one
            return replace(one, dtype=_DTYPES[self.frozen_dtype])

        frozen = jax.tree.map(stored, model.parameters, is_leaf=is_parameter)
        return rebuilt(model, parameters, self._rebuild(model, factored), frozen=frozen)

    def matrices(self, model: Model) -> dict[str, Matrix]:
        """Return path -> each matrix that changes.

        Raises:
            InputError: A target matches nothing that can change.
        """
        names = {group.name for group in model.groups}
        known = {
            path: matrix
            for path, one in flat(model.parameters).items()
            if path.split(".")[0] in names and (matrix := Matrix.from_parameter(one))
        }
        for target in self.targets:
            if not any(_matches(target, path) for path in known):
                parts = sorted({part for path in known for part in path.split(".")[1:]})
                raise InputError(
                    f"target {target!r} matches no matrix of the blocks; "
                    f"{nearest(target, [*parts, *known])}",
                    key="model.unknown_lora_target",
                )
        return {
            path: matrix
            for path, matrix in known.items()
            if any(_matches(target, path) for target in self.targets)
        }

    def state(self, model: Model, params: Params, state: Params | None = None) -> Any:
        """Return values of the given model as state of the new one (`TrainStep.init`).

        Args:
            model: The given model.
            params: Its parameters: arrays, or objects with a shape that can be indexed.
            state: Its own state, if it has some.
        """
        names = [group.name for group in model.groups]
        return with_frozen(names, state or {}, params)

    def merged(
        self, model: Model, params: Params, state: Params
    ) -> tuple[Params, Params]:
        """Return parameters and state of the given model, matrices with their products.

        Args:
            model: The given model.
            params: A and B, layers first to last: arrays, or objects to be indexed.
            state: State of the new model.

        Returns:
            Two trees like the given model's; adapted matrices are `Merged`.
        """
        own, frozen = without_frozen([group.name for group in model.groups], state)
        for path, matrix in self.matrices(model).items():
            keys = path.split(".")
            factors = _at(params, keys)
            one = Merged(_at(frozen, keys), factors["a"], factors["b"], matrix, self)
            frozen = _with(frozen, keys, one)
        return frozen, own

    def _rebuild(self, model: Model, factored: Mapping[str, Matrix]) -> Callable:
        scale, kept = self.scale, model.parameters

        def rebuild(name: str, params: Params, frozen: Params) -> Params:
            as_stored = frozen
            frozen = _cast_frozen(params, frozen, kept.get(name))
            for path, matrix in factored.items():
                first, *keys = path.split(".")
                if first == name:
                    own, weight = _at(params, keys), _at(as_stored, keys)
                    product = matrix.product(own["a"], own["b"])
                    sum_ = weight.astype(jnp.float32) + scale * product
                    used = _narrower(weight.dtype, own["a"].dtype)
                    frozen = _with(frozen, keys, sum_.astype(used))
            return frozen

        return rebuild


@dataclass(frozen=True)
class Merged:
    """A stacked parameter with its product; reading a part computes that part.

    Args:
        weight: The frozen weight, (layers, ...).
        a, b: The factors, (layers, ...).
        matrix: The parameter as a matrix.
        lora: The adapter.
    """

    weight: Any
    a: Any
    b: Any
    matrix: Matrix
    lora: LoRA

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, (layers, ...)."""
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the values that are read."""
        return np.dtype(np.float32)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part, as NumPy does for slices of the first dims."""
        index = index if isinstance(index, tuple) else (index,)
        if index and index[0] is Ellipsis:
            index = ()
        index = (*index, *(slice(None) for _ in self.shape[len(index) :]))
        whole, num_batch = slice(None), self.matrix.num_batch + 1  # and layers
        first = num_batch + self.matrix.num_inputs
        weight = np.asarray(self.weight[index], np.float32)
        a = np.asarray(self.a[(*index[:first], whole)], np.float32)
        b = np.asarray(self.b[(*index[:num_batch], whole, *index[first:])], np.float32)
        product = np.einsum(self.matrix.formula("l"), a, b)
        return weight + np.float32(self.lora.scale) * product


def _factors(matrix: Matrix, rank: int) -> dict[str, Parameter]:
    """Return A and B: the parameter's dims, and one of the rank."""
    one, first = matrix.parameter, matrix.num_batch + matrix.num_inputs
    shape, axes, num_batch = one.shape, one.logical_axes, matrix.num_batch
    out_shape = (*shape[:num_batch], rank, *shape[first:])

    def random(key: jax.Array) -> jax.Array:
        drawn = jax.random.normal(key, (*shape[:first], rank), jnp.float32)
        return drawn / math.sqrt(math.prod(shape[num_batch:first]))

    fp32 = replace(one, dtype=jnp.float32)
    return {
        "a": replace(
            fp32,
            shape=(*shape[:first], rank),
            logical_axes=(*axes[:first], None),
            initial=random,
        ),
        "b": replace(
            fp32,
            shape=out_shape,
            logical_axes=(*axes[:num_batch], None, *axes[first:]),
            initial=lambda key: jnp.zeros(out_shape, jnp.float32),
        ),
    }


def _cast_frozen(params: Params, frozen: Params, known: Any) -> Params:
    """Return frozen weights in the dtype of A and B, unless theirs is narrower.

    Weights outside the blocks keep their dtype.

    Args:
        params: A and B of a group's layer; nothing outside the blocks.
        frozen: The frozen weights there.
        known: `Parameter` of each; one that is used in full stays in fp32.
    """
    given = jax.tree.leaves(params)
    if not given:
        return frozen

    def cast(one: Parameter, value: jax.Array) -> jax.Array:
        if one.in_full or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return value.astype(_narrower(value.dtype, given[0].dtype))

    return jax.tree.map(cast, known, frozen, is_leaf=is_parameter)


def _narrower(stored: Any, given: Any) -> Any:
    """Return the narrower dtype, of the stored weight or of A and B."""
    return min(stored, given, key=lambda dtype: jnp.dtype(dtype).itemsize)


def _matches(target: str, path: str) -> bool:
    """Return True if a path has the target's keys, one after another."""
    return f".{target}." in f".{path}."


def _at(tree: Any, keys: list[str]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _with(tree: Any, keys: list[str], value: Any) -> Any:
    """Return the tree with another value at a place."""
    if not keys:
        return value
    first, *rest = keys
    return {**tree, first: _with(tree[first], rest, value)}


FROZEN = "frozen"
"""Key of the frozen arrays in the state of a group, and of the ends."""

Rebuild = Callable[[str, Params, Params], Params]
"""(group's name or `ends`, its parameters, its frozen arrays) -> parameters of one
layer of the given model."""


def rebuilt(
    model: Model,
    parameters: Params,
    rebuild: Rebuild,
    *,
    frozen: Params | None = None,
) -> Model:
    """Return a model with the same functions over other parameters and frozen state.

    Args:
        model: The given model, not arranged for stages.
        parameters: Tree of `Parameter` in place of the model's, groups under their
            names; each is drawn by its own `initial`.
        rebuild: Makes the given model's parameters of them, layer by layer.
        frozen: Tree of `Parameter` without gradients, laid out by the rules: a part of
            the new model's state, under `frozen`.
    """
    names = [group.name for group in model.groups]
    frozen = frozen or {}
    return replace(
        model,
        parameters=parameters,
        embed=_over(ENDS, model.embed, rebuild),
        groups=tuple(_group(group, rebuild) for group in model.groups),
        head=_over(ENDS, model.head, rebuild),
        logits=None if model.logits is None else _over(ENDS, model.logits, rebuild),
        state=with_frozen(names, model.state, frozen),
        build=_build(model, frozen),
        modules={},
    )


def with_frozen(names: list[str], state: Params, frozen: Params) -> Params:
    """Return a model's state with frozen arrays in it, of any kind of leaf.

    Args:
        names: Names of the groups.
        state: State of the given model.
        frozen: Tree like its parameters.
    """
    found = dict(state)
    for name in names:
        if name in frozen:
            found[name] = {**state.get(name, {}), FROZEN: frozen[name]}
    ends = {key: value for key, value in frozen.items() if key not in names}
    return {**found, FROZEN: ends} if ends else found


def without_frozen(names: list[str], state: Params) -> tuple[Params, Params]:
    """Return the model's own state, and the frozen arrays (`with_frozen`)."""
    own, frozen = _split_frozen(state)
    for name in names:
        if name in own:
            group_state, kept = _split_frozen(own.pop(name))
            frozen = {**frozen, name: kept} if kept else frozen
            own = {**own, name: group_state} if group_state else own
    return own, frozen


def _over(name: str, function: Callable, rebuild: Rebuild) -> Callable[..., Any]:
    """Return a function of a model, `(params, ..., scope)`, over other parameters.

    Args:
        name: Group of the function, or `ends`.
        function: Function of the given model.
        rebuild: Makes its parameters.
    """

    def over(params: Params, *given: Any) -> Any:
        *others, scope = given
        own, kept = _split_frozen(scope.state)
        params = rebuild(name, params, kept)
        return function(params, *others, replace(scope, state=own))

    return over


def _group(group: BlockGroup, rebuild: Rebuild) -> BlockGroup:
    def updated(params: Params, state: Params, sums: Sums) -> Params:
        own, kept = _split_frozen(state)
        new = group.updated(rebuild(group.name, params, kept), own, sums)
        return {**new, FROZEN: kept} if kept else new

    return replace(
        group,
        block=_over(group.name, group.block, rebuild),
        enter=None if group.enter is None else _over(ENDS, group.enter, rebuild),
        update_state=None,
        update_from=updated if group.changes_state else None,
    )


def _build(model: Model, frozen: Params) -> dict[str, Any]:
    """Return the model's builders, which give frozen parameters as state."""

    def built(name: str, build: Callable) -> Callable[[jax.Array], Any]:
        kept = frozen.get(name) if name != ENDS else frozen

        def build_frozen(key: jax.Array) -> tuple[Params, Params]:
            params, state = build(key)
            return {}, {**state, FROZEN: params} if kept else state

        return build_frozen

    return {name: built(name, build) for name, build in model.build.items()}


def _split_frozen(state: Params) -> tuple[Params, Params]:
    own = {key: value for key, value in state.items() if key != FROZEN}
    return own, state.get(FROZEN, {})
