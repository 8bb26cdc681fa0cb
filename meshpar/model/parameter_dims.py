"""Dims of a model's parameters: which are one, and what the model does with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, is_parameter
from meshpar.model.tracing import traced_batch, traced_forward
from meshpar.trace.dim_uses import DimUses, Use
from meshpar.trace.operations import operation_line
from meshpar.trace.walk import source_line


@dataclass(frozen=True)
class ParameterDims:
    """The dims of a model's parameters, by what its trace does with them.

    Args:
        uses: Of the trace of one layer of each group, and of the ends.
        paths: Path of each parameter in the tree.
        parameters: The parameters.
        dims: The class of each dim of each.
        batch: The classes of the dims of the batch's arrays.
    """

    uses: DimUses
    paths: tuple[tuple[str, ...], ...]
    parameters: tuple[Parameter, ...]
    dims: tuple[tuple[int, ...], ...]
    batch: frozenset[int]

    def cuts(self, dim: int) -> list[Use]:
        """Return the slices that cut a dim into pieces; none if there is one piece.

        A dim that a reshape cuts into parts is cut too where its first part is, and a
        piece where the dim is that it is cut from: a split of one splits the others.
        What functions of this library cut, they move as it is split.
        """
        for part in dict.fromkeys((dim, self.uses.classes.parts(dim)[0])):
            cuts = [
                use
                for use in self.uses.in_class(part)
                if use.kind == "cut"
                and not source_line(use.equation, _OTHERS).startswith(_ROOM)
            ]
            if len({use.piece for use in cuts}) > 1:
                return cuts
        wholes = (use.whole for use in self.uses.in_class(dim))
        pieces = (self.cuts(whole) for whole in wholes if whole is not None)
        return next(filter(None, pieces), [])

    def routed_experts(self) -> list[tuple[str, Parameter]]:
        """Return path and parameter of the arrays that `meshpar.experts` reads."""
        return [
            (".".join(path), parameter)
            for path, parameter, dims in zip(
                self.paths, self.parameters, self.dims, strict=True
            )
            if dims and any(map(_is_routed, self.uses.in_class(dims[0])))
        ]


@functools.lru_cache(maxsize=4)
def parameter_dims(model: Model, examples: int, seq: int) -> ParameterDims:
    """Return the dims of the parameters of a model, followed through its trace.

    Args:
        model: The model; one layer of each group of blocks is traced.
        examples: Examples in the batch.
        seq: Size of every dim that its inputs leave open.
    """
    batch = traced_batch(model, examples, seq)
    once, *shapes = traced_forward(model, batch, head=True, training=False)
    program: ClosedJaxpr = jax.make_jaxpr(once)(*shapes)
    declared = jax.tree.leaves_with_path(
        model.split(model.parameters), is_leaf=is_parameter
    )
    names = [group.name for group in model.groups]
    counts = [len(jax.tree.leaves(shape)) for shape in shapes]
    uses = DimUses(program, [at < counts[0] for at in range(sum(counts))])
    batch_dims = uses.arguments[sum(counts[:-1]) :]
    return ParameterDims(
        uses=uses,
        paths=tuple(_tree_path(keys, names) for keys, _ in declared),
        parameters=tuple(parameter for _, parameter in declared),
        dims=tuple(
            tuple(map(uses.classes.find, dims)) for dims in uses.arguments[: counts[0]]
        ),
        batch=frozenset(uses.classes.find(dim) for dims in batch_dims for dim in dims),
    )


def _tree_path(keys: Sequence[Any], groups: Sequence[str]) -> tuple[str, ...]:
    """Return the path in the model's tree of a leaf of (ends, [each group's])."""
    if keys[0].idx == 0:
        return tuple(str(key.key) for key in keys[1:])
    return (groups[keys[1].idx], *(str(key.key) for key in keys[2:]))


def cuts_in_words(cuts: Sequence[Use]) -> str:
    """Return where slices cut a dim, such as `at 32, 64 (model.py:7)`."""
    places = sorted({use.piece[0] for use in cuts if use.piece and use.piece[0]})
    line = operation_line(cuts[0].equation)
    words = f"at {', '.join(map(str, places))}" if places else "by an index"
    return words + (f" ({line})" if line else "")


def _is_routed(use: Use) -> bool:
    return use.kind == "experts" and source_line(use.equation, _OTHERS).startswith(
        str(Path(_ROOM, "parallel", "expert"))
    )


_ROOM = str(Path(__file__).parents[1])
_BETWEEN = ("jax", "jaxlib", "flax", "optax", "equinox")
_OTHERS = (
    *(f"/{site}-packages/{name}/" for site in ("site", "dist") for name in _BETWEEN),
    *("/functools.py", "/contextlib.py", "<"),
)
"""Parts of paths of files between a model and the operations that it makes."""
