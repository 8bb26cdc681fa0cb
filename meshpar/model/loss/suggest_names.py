"""Suggest logical axes of a loss's parameters from its trace (`suggest_names`).

Dims that operations make equal have one name (`meshpar.trace.dim_uses`). The residual
stream is `embed`. One dim of a parameter at most is split over `tensor`: `vocab`,
`heads`, `kv_heads` or `mlp`. A dim without a name stays whole, and the reason is told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from meshpar.errors import InputError
from meshpar.model.contract import Model, check_model
from meshpar.model.loss.leaf_names import path_expression
from meshpar.model.parameter import is_parameter
from meshpar.model.parameter_dims import ParameterDims, cuts_in_words, parameter_dims
from meshpar.model.tracing import traced_batch, tracing
from meshpar.rules.rules import LogicalAxes

SPLIT = ("vocab", "heads", "kv_heads", "mlp")
"""Names that `default_rules` split over `tensor`: one for each parameter at most."""

_EXAMPLES = 8


class SuggestedNames(dict[str, LogicalAxes]):
    """Patterns of parameters' paths and their logical axes, for `from_loss(names=)`.

    `str()` is a table to paste into a program, with the reason of each None.

    Attributes:
        reasons: Pattern -> why dims of these parameters have no name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, tuple[str, ...]] = {}

    def __str__(self) -> str:
        lines = []
        for pattern, axes in self.items():
            words = [f'"{name}"' if name else "None" for name in axes]
            comma = "," if len(words) == 1 else ""
            lines += [f"    # {line}" for line in self.reasons.get(pattern, ())]
            lines.append(f'    "{pattern}": ({", ".join(words)}{comma}),')
        return "\n".join(["names = {", *lines, "}"])

    def as_dict(self) -> dict[str, Any]:
        """Return names and reasons for JSON."""
        names = {pattern: list(axes) for pattern, axes in self.items()}
        return {"names": names, "reasons": self.reasons}


def suggest_names(model: Model, *, seq: int = 128) -> SuggestedNames:
    """Return logical axes for every parameter of a loss, from its trace.

    Nothing is compiled. Names that the model has are not read. Look through the table
    before you use it: it is a proposal, and `meshpar.lint` checks it under a layout.

    Args:
        model: From `from_loss`, which may be without `names`.
        seq: Size of every dim that its inputs leave open.

    Raises:
        InputError: The model is not from `from_loss`, or cannot be traced.

    Example:
        >>> import jax.numpy as jnp
        >>> from meshpar import Input, from_loss
        >>> def init(key):
        ...     return {"up": jnp.zeros((4, 8)), "down": jnp.zeros((8, 1))}
        >>> def loss(params, batch, key):
        ...     y = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        ...     return (y**2).sum(), jnp.float32(len(y))
        >>> inputs = {"x": Input(("batch", None), shape=(None, 4))}
        >>> print(suggest_names(from_loss(init, loss, inputs=inputs)))
        names = {
            # dim 1 (1): an output that no other parameter reads
            "down": ("mlp", None),
            # dim 0 (4): the arrays of the batch have it
            "up": (None, "mlp"),
        }
    """
    check_model(model)
    if model.unflatten is None:
        raise InputError(
            "suggest_names takes a model of from_loss, whose names are by path; "
            "modules of from_nnx have names as metadata (nnx.with_partitioning)",
            key="model.names_not_by_path",
        )
    traced_batch(model, _EXAMPLES, seq)  # Its own error names the input.
    with tracing("the loss cannot be traced", "give seq= or the inputs' shapes"):
        dims = parameter_dims(model, _EXAMPLES, seq)
    return _by_pattern(model, _Suggestion(dims).axes())


class _Suggestion:
    """Names of the classes of dims, one after another."""

    def __init__(self, dims: ParameterDims) -> None:
        self._dims, self._uses = dims, dims.uses
        self._name: dict[int, str] = {}
        self._classes = list(dict.fromkeys(dim for one in dims.dims for dim in one))
        self._kinds = {
            dim: {use.kind for use in self._uses.in_class(dim)} for dim in self._classes
        }
        self._stream()
        for dim in self._classes:
            if "experts" in self._kinds[dim]:
                self._name.setdefault(dim, "experts")
        self._rows = [dim for dim in self._classes if "looked_up" in self._kinds[dim]]
        self._num_rows = max(map(self._size, self._rows), default=0)
        for dim in self._classes:
            is_output = self._kinds[dim] == {"free"}
            if self._size(dim) == self._num_rows and (is_output or dim in self._rows):
                self._split(dim, "vocab")
        self._attention()
        for dim in self._classes:
            if {"contracted", "free"} <= self._kinds[dim]:
                self._split(dim, "mlp")

    def axes(self) -> list[tuple[LogicalAxes, tuple[str, ...]]]:
        """Return the names of each parameter's dims, and the reasons of None."""
        suggested = []
        for dims in self._dims.dims:
            names = [
                None if dim in dims[:at] else self._name.get(dim)
                for at, dim in enumerate(dims)
            ]
            reasons = tuple(
                f"dim {at} ({self._size(dim)}): {self._reason(dim)}"
                for at, (dim, name) in enumerate(zip(dims, names, strict=True))
                if name is None
            )
            suggested.append((tuple(names), reasons))
        return suggested

    def _size(self, dim: int) -> int:
        return self._uses.classes.size(dim)

    def _parts(self, dim: int) -> tuple[int, ...]:
        return self._uses.classes.parts(dim)

    def _stream(self) -> None:
        """Name the residual stream: of dims that are added up, the most shared."""
        counts = Counter(dim for one in self._dims.dims for dim in set(one))
        added = [
            dim
            for dim in self._classes
            if "added" in self._kinds[dim] and dim not in self._dims.batch
        ]
        if added:
            self._name[max(added, key=lambda dim: counts[dim])] = "embed"

    def _attention(self) -> None:
        heads = {
            dim: self._num_heads(dim)
            for dim in self._classes
            if self._is_heads(dim) and dim not in (*self._rows, *self._name)
        }
        most = max(heads.values(), default=0)
        for dim, number in heads.items():
            if number % 2 == 0:
                self._split(dim, "heads" if number == most else "kv_heads")
        firsts = {self._parts(dim)[0] for dim in heads if dim in self._name}
        for dim in self._classes:  # What attention returns may be no one's output.
            is_whole = len(self._parts(dim)) > 1 and "contracted" in self._kinds[dim]
            if is_whole and self._parts(dim)[0] in firsts:
                self._split(dim, "heads")
        for dims in self._dims.dims:
            for dim in dims if any(dim in heads for dim in dims) else ():
                if "inner" in self._kinds[dim] and dim not in heads:
                    self._name.setdefault(dim, "head_dim")

    def _is_heads(self, dim: int) -> bool:
        """Return True if a weight's output is heads that attention multiplies."""
        parts = self._parts(dim)
        first, last = (
            {use.kind for use in self._uses.in_class(part)}
            for part in (parts[0], parts[-1])
        )
        if len(parts) == 1:
            return "shared" in first
        return "free" in self._kinds[dim] and ("shared" in first or "inner" in last)

    def _num_heads(self, dim: int) -> int:
        parts = self._parts(dim)
        each = self._size(parts[-1]) if len(parts) > 1 else 1
        return self._size(dim) // each

    def _split(self, dim: int, name: str) -> None:
        """Name a dim that `tensor` is to split, unless something speaks against it."""
        against = self._against(dim) or self._beside_split(dim)
        if dim not in self._name and not against and dim not in self._dims.batch:
            self._name[dim] = name

    def _against(self, dim: int) -> str | None:
        """Return why a dim should not be split; None if nothing speaks against it."""
        cuts = self._dims.cuts(dim)
        if cuts:
            words = cuts_in_words(cuts)
            return f"cut, or a piece cut, {words}: a split would move every piece"
        kinds = self._kinds[dim]
        is_read = {"free"} < kinds or self._size(dim) == self._num_rows
        if self._size(dim) % 2 and is_read:
            return f"{self._size(dim)} does not divide by 2; pad it to split it"
        if "added" in kinds:
            return "another residual stream than the one of embed"
        return "channels of a convolution" if "convolved" in kinds else None

    def _beside_split(self, dim: int) -> bool:
        """Return True if a parameter has the dim and another one that is split."""
        return any(
            dims.count(dim) > 1
            or any(self._name.get(other) in SPLIT for other in dims if other != dim)
            for dims in self._dims.dims
            if dim in dims
        )

    def _reason(self, dim: int) -> str:
        """Return why a dim has no name."""
        kinds = self._kinds[dim]
        if self._name.get(dim) is not None:
            return f"{self._name[dim]!r} again, which names one dim of a parameter"
        if dim in self._dims.batch:
            return "the arrays of the batch have it"
        if against := self._against(dim):
            return against
        if self._is_heads(dim) and self._num_heads(dim) % 2:
            return f"{self._num_heads(dim)} heads, which do not divide by 2"
        if {"contracted", "free"} <= kinds and self._beside_split(dim):
            return "another dim of a parameter that has it is split"
        return next((_REASONS[kind] for kind in _REASONS if kind in kinds), _UNUSED)


_UNUSED = "no matmul and no lookup reads it"
_REASONS = {
    "looped": "layers that a loop runs over; blocks= names them",
    "window": "places of a convolution's kernel",
    "placed": "rows looked up by position",
    "looked_up": "rows of a small table",
    "inner": "positions, or the features of a head, that attention multiplies",
    "free": "an output that no other parameter reads",
    "contracted": "a matmul reads it, but no single parameter writes it",
}
"""Kind of use -> why a dim with it has no name; the first that applies."""


def _by_pattern(
    model: Model, suggested: Sequence[tuple[LogicalAxes, tuple[str, ...]]]
) -> SuggestedNames:
    """Return the shortest patterns that match no parameter of other names."""
    paths = _user_paths(model)
    pairs = zip(paths, suggested, strict=True)
    texts = {"/" + "/".join(path): axes for path, (axes, _) in pairs}
    names = SuggestedNames()
    for path, (axes, reasons) in zip(paths, suggested, strict=True):
        if len(axes) < 2 and not any(name in SPLIT for name in axes):
            continue  # Norms and biases are small.
        for pattern in _patterns(path):
            matches = path_expression(pattern).fullmatch
            if all(own == axes for text, own in texts.items() if matches(text)):
                break
        names[pattern] = axes
        if reasons:
            names.reasons.setdefault(pattern, reasons)
    return names


def _user_paths(model: Model) -> list[tuple[str, ...]]:
    """Return the path of each parameter in the user's own tree, layers as 0."""
    ends, groups = model.split(model.parameters)
    paths = [*_paths(ends)]
    for group, tree in zip(model.groups, groups, strict=True):
        above = [key.replace("*", "0") for key in re.split(r"[/.]", group.called)]
        paths += [(*above, "0", *path) for path in _paths(tree)]
    return paths


def _paths(tree: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for keys, _ in jax.tree.leaves_with_path(tree, is_leaf=is_parameter):
        yield tuple(str(key.key) for key in keys)


def _patterns(path: Sequence[str]) -> Iterator[str]:
    """Yield patterns of a path, the shortest and most general first."""
    for length in range(1, len(path) + 1):
        keys = [key.replace(".", "*") for key in path[-length:]]
        front = "" if length == len(path) else "**/"
        yield front + "/".join(re.sub(r"\d+", "*", key) for key in keys)
        yield front + "/".join(keys)
