"""Inputs: declarations of the arrays of a batch, and the shapes that follow.

    {"images": Input(("batch", "height", "width", "channels"), "float"),
     "labels": Input(("batch",), "int")}

The example comes first in every array; dims of one logical axis have one size.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshpar.errors import InputError, nearest, whole_number
from meshpar.rules.rules import LogicalAxes

BATCH_DIM = "batch"
"""The logical axis of the examples."""

_DTYPES = {
    "int": jnp.int32,
    "float": jnp.float32,
    "bool": jnp.bool_,
    "complex": jnp.complex64,
}
_DEFAULT = "meshpar.models.inputs:LANGUAGE"
"""Inputs of a model that declares none, if the models are installed."""

Inputs: TypeAlias = Mapping[str, "Input"]


class MissingInputError(InputError, KeyError):
    """A model's function reads an array that the batch does not have."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class Input:
    """One array of a batch.

    Args:
        logical_axes: A name, or None, for each dim; `batch` is the first.
        kind: Kind of its numbers: `int`, `float` (which takes integers and booleans
            too), `bool` or `complex`.
        optional: Whether a batch may be without it.
        shape: Sizes of dims that every batch has alike, None for any other; all vary
            when absent.
        below: Integers are from 0 to below this; not known when absent. Checked where
            the array is in the host's memory; one on a device is not fetched for it.
        counted_by: Name of the input of weights, of the same dims, whose 0 leaves an
            element out: there it may be anything.
        is_weight: Whether it says how much each of its elements counts in the loss: a
            number of 0 or more.
        has_gradient: Whether the step finds the loss's gradient of it, as of rows that
            were looked up outside the model (`meshpar.tables`). `embed` alone reads it.

    Raises:
        InputError: The example does not come first, there is no such kind, or not a
            size for each dim, or a gradient is asked of what is not `float`.

    Example:
        >>> Input(("batch", "seq"), "int").dim("seq")
        1
    """

    logical_axes: LogicalAxes
    kind: str = "float"
    optional: bool = False
    shape: tuple[int | None, ...] | None = None
    below: int | None = None
    counted_by: str | None = None
    is_weight: bool = False
    has_gradient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.logical_axes, tuple | list):
            raise InputError(
                f"an input's logical axes are {self.logical_axes!r}; give a tuple with "
                "a name, or None, for each dim",
                key="batch.input_axes_not_tuple",
            )
        object.__setattr__(self, "logical_axes", tuple(self.logical_axes))
        if self.below is not None:
            whole_number("below", self.below)
        if self.logical_axes[:1] != (BATCH_DIM,):
            raise InputError(
                f"an input's logical axes are {self.logical_axes}; the example comes "
                f"first in every array of a batch: begin with {BATCH_DIM!r}",
                key="batch.example_not_first",
            )
        if self.kind not in _DTYPES:
            raise InputError(
                f"no kind {self.kind!r} of numbers; {nearest(self.kind, _DTYPES)}",
                key="batch.unknown_kind",
            )

        if self.has_gradient and self.kind != "float":
            raise InputError(
                f"an input of kind {self.kind!r} has no gradient; make it 'float', or "
                "leave has_gradient out",
                key="batch.kind_without_gradient",
            )
        if self.shape is not None and len(self.shape) != len(self.logical_axes):
            raise InputError(
                f"an input's shape {self.shape} has {len(self.shape)} sizes for the "
                f"dims {self.logical_axes}; give one, or None, for each",
                key="batch.wrong_number_of_sizes",
            )

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """The size of each dim, None where batches differ."""
        return self.shape or (None,) * len(self.logical_axes)

    def dim(self, logical_axis: str) -> int | None:
        """Return the dim of a logical axis; None if the array has none."""
        if logical_axis not in self.logical_axes:
            return None
        return self.logical_axes.index(logical_axis)

    @property
    def dtype(self) -> Any:
        """Dtype of the array's shape for compiling."""
        return _DTYPES[self.kind]


class Batch(dict):
    """The arrays of a batch as a model's functions see them.

    Raises:
        MissingInputError: Of an array that is not there, by its name.
    """

    def __missing__(self, name: str) -> Any:
        has = ", ".join(map(repr, self)) or "nothing"
        raise MissingInputError(
            f"the model reads batch[{name!r}], but the batch has {has}; add the array",
            key="batch.missing_array",
        )


def check_inputs(inputs: Any) -> None:
    """Raise if the argument is no mapping of names to `Input`.

    Raises:
        InputError: It is something else.
    """
    if inputs is None:
        return
    if not isinstance(inputs, Mapping):
        raise InputError(
            f"inputs is a {type(inputs).__name__}; give a dict of name -> "
            "meshpar.Input(('batch', ...))",
            key="batch.inputs_not_a_dict",
        )
    for name, one in inputs.items():
        if not isinstance(one, Input):
            raise InputError(
                f"inputs[{name!r}] is {one!r}; give meshpar.Input(('batch', ...))",
                key="batch.not_an_input",
            )


def default_inputs() -> Inputs:
    """Return the inputs of a language model, for a model that declares none.

    Empty if the package of models is not installed.
    """
    module, _, name = _DEFAULT.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return {}


def split_gradient_inputs(
    inputs: Inputs | None, batch: Mapping[str, Any]
) -> tuple[dict, dict]:
    """Return the arrays of a batch without a gradient, and those with one."""
    names = {name for name, one in (inputs or {}).items() if one.has_gradient}
    without = {name: array for name, array in batch.items() if name not in names}
    return without, {name: batch[name] for name in batch if name in names}


def logical_sizes(inputs: Inputs) -> tuple[str, ...]:
    """Return the logical axes whose sizes differ between batches, in order of use.

    Example:
        >>> logical_sizes({"x": Input(("batch", "seq")), "y": Input(("batch",))})
        ('batch', 'seq')
    """
    names = (
        name
        for one in inputs.values()
        for name, size in zip(one.logical_axes, one.sizes, strict=True)
        if not one.optional and name is not None and size is None
    )
    return tuple(dict.fromkeys(names))


def input_shapes(
    inputs: Inputs, sizes: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the declared arrays of a batch, without optional ones.

    Args:
        inputs: Inputs of the model.
        sizes: Size of each logical axis.

    Raises:
        InputError: A size is missing, or an array has a dim without a name.

    Example:
        >>> input_shapes({"y": Input(("batch",), "int")}, {"batch": 4})["y"].shape
        (4,)
    """
    return {
        name: jax.ShapeDtypeStruct(_shape(name, one, sizes), one.dtype)
        for name, one in inputs.items()
        if not one.optional
    }


def open_size(inputs: Inputs, batch: Mapping[str, Any]) -> int:
    """Return the largest size of a batch that its inputs leave open; 1 if none.

    Example:
        >>> tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
        >>> open_size({"tokens": Input(("batch", "seq"), "int")}, {"tokens": tokens})
        128
    """
    sizes = [1]
    for name, declared in inputs.items():
        if name in batch and not declared.optional:
            dims = zip(declared.sizes[1:], batch[name].shape[1:], strict=False)
            sizes += [size for fixed, size in dims if fixed is None]
    return max(sizes)


def _shape(name: str, one: Input, sizes: Mapping[str, int]) -> tuple[int, ...]:
    dims = list(zip(one.logical_axes, one.sizes, strict=True))
    if (None, None) in dims:
        shape = ", ".join(
            str(size) if size else "None" if axis else "N" for axis, size in dims
        )
        raise InputError(
            f"inputs[{name!r}] is {one.logical_axes}, with a dim that has neither a "
            f"name nor a size; name it, or give its size N: shape=({shape})",
            key="batch.size_not_given",
        )
    missing = [axis for axis, size in dims if size is None and axis not in sizes]
    if missing:
        given = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise InputError(
            f"batch[{name!r}] is {one.logical_axes}, but the sizes given are "
            f"{given or 'none'}; give {', '.join(map(str, missing))} too",
            key="batch.missing_size",
        )
    return tuple(sizes[str(axis)] if size is None else size for axis, size in dims)
