"""Check before training that a model treats every example by itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.checks.halves import CANNOT_RUN, EXAMPLES, check_small, what_halves_change
from meshpar.checks.own_derivatives import own_derivatives
from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM
from meshpar.model.tracing import one_layer_shapes, one_layer_state, traced_forward
from meshpar.trace.token_mixing import Traced

_FEW_TOKENS = (8, 16)
"""Sequence lengths to try, shortest first."""

_FEW = 32
"""Largest batch on which a model runs whole."""

_TIMES, _MANY = 13, 100
"""Smallest multiple of the batch that is traced, unless it has so many examples.

Dims of examples are recognised by their size, which few other dims have then. Whatever
divides the batch divides a multiple of it. A large batch is traced as it is, since a
model may build NumPy arrays as large.
"""


def check_examples_first(model: Model, batch: Any) -> None:
    """Raise if a model drops out along another dim than the examples.

    If that dim happens to be as long as there are examples, one layout would accept it
    and another not: so the model is tried with two and three times as many.

    Args:
        model: The model.
        batch: Arrays of a batch, or their shapes.

    Raises:
        InputError: `Scope.dropout` is given another first dim.
    """
    once, *shapes = traced_forward(model, _times(batch, 1), head=True)
    program = jax.make_jaxpr(once)(*shapes)
    if "random_bits" not in str(program):
        return
    for times in (2, 3):
        once, *shapes = traced_forward(model, _times(batch, times), head=True)
        jax.eval_shape(once, *shapes)


def check_examples_apart(
    model: Model, batch: Any, layout: str, *, logits: bool = False
) -> None:
    """Raise if a model joins examples otherwise than by sums.

    Each device and microbatch has some examples of the batch. A result that is no sum
    over examples, such as a difference to a mean, a contrastive loss or noise of the
    batch's shape, would depend on which ones. A trace decides if it knows every
    operation and the model defines no backward of its own. Otherwise a small instance
    of the model runs whole and in halves (`meshpar.checks.halves`), and the trace names
    the line. If a layer is too large for that, the trace decides alone, with a warning.

    Args:
        model: The model.
        batch: Arrays of a batch, or their shapes.
        layout: Layout that splits the batch, in words.
        logits: Whether to check `logits` in place of the loss.

    Raises:
        InputError: It joins examples.
    """
    shapes = tuple(
        (name, tuple(x.shape), jnp.dtype(x.dtype).name) for name, x in batch.items()
    )
    found = _what_joins(model, shapes, logits)
    if found is None:
        return
    function, instead = "a function of the model", "sums over examples only"
    if logits:
        function, instead = "logits", "each example's own"
    raise InputError(
        f"layout {layout!r} splits the examples over devices or microbatches, but "
        f"{function} joins examples: {found}; return {instead}, use "
        "scope.batch_sum for statistics and scope.key for noise, or do not split the "
        "batch",
        key="model.joins_examples",
    )


def clear_cache() -> None:
    """Clear the cached results of `check_examples_apart`."""
    _what_joins.cache_clear()


@functools.lru_cache(maxsize=16)
def _what_joins(
    model: Model, shapes: tuple[tuple[str, tuple[int, ...], str], ...], logits: bool
) -> str | None:
    """Return what joins examples, in words; None if nothing does."""
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes}
    traced, found, asked = _traced(model, batch, logits)
    if found is not None:
        # With one token a sequence, no reshape merges examples with tokens.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            short = _with_few_tokens(model, batch, 1)
            again, found_in_short, _ = _traced(model, short, logits)
            traced, found = (again, None) if found_in_short is None else (traced, found)
    written = [] if found else own_derivatives(traced.program)
    if found is None and not written:
        return None
    # To the trace a sum over the global batch is one over the examples at hand.
    place = f": {_about_examples(found)}" if found and not asked else ""
    if written:
        place = f": see the derivative of your own at {written[0]}"
    try:
        changed = _run_in_halves(model, batch, logits)
    except CANNOT_RUN as error:
        _warn(model, error, is_judged=not asked)
    else:
        return None if changed is None else changed + place
    surely = None if asked else traced.surely_mixes()
    return None if surely is None else _about_examples(surely)


def _traced(
    model: Model, batch: Any, logits: bool
) -> tuple[Traced, str | None, list[str]]:
    """Trace a model on many times the examples of a batch.

    Returns:
        The trace, what joins examples in it or is no sum over them, and the sums over
        the global batch that the model asks for.
    """
    params, state = one_layer_shapes(model), one_layer_state(model)
    batch_of_own_size = _with_own_size(batch, params, state)
    asked: list[str] = []

    def forward(of_examples: list, params: tuple, state: tuple) -> Any:
        batch, examples = of_examples
        once, *_ = traced_forward(
            *(model, batch),
            head=not logits,
            logits=logits,
            examples=examples,
            batch_sums=asked,
        )
        return once(params, state, batch)

    def traced_on(batch: Any) -> Traced:
        num = jax.tree.leaves(batch)[0].shape[0]
        given = {name: (shape, 0) for name, shape in batch.items()}
        numbers = jax.ShapeDtypeStruct((num,), jnp.uint32), 0
        return Traced.from_function(forward, num, [given, numbers], params, state)

    whole = traced_on(batch_of_own_size)
    found = whole.mixes()
    if found is None and not logits and whole.needs_second_trace():
        fewer = _times(batch, max(1, whole.num_tokens // _num_examples(batch) // 2))
        if _num_examples(fewer) < whole.num_tokens:
            found = whole.mixes(fewer=traced_on(fewer), sums=True)
    return whole, found, asked


def _num_examples(batch: Any) -> int:
    return next(iter(batch.values())).shape[0]


def _run_in_halves(model: Model, batch: Any, logits: bool) -> str | None:
    """Run a small instance.

    Raises:
        ValueError: It is too large to run.
    """
    small = _few_examples(batch)
    for seq in _FEW_TOKENS:
        shorter = _with_few_tokens(model, small, seq)
        once, *shapes = traced_forward(model, shorter, head=not logits, logits=logits)
        try:
            jax.eval_shape(once, *shapes)
        except (KeyError, TypeError, ValueError):
            continue  # Sequences that this model does not take.
        small = shorter
        break
    check_small(model, small)
    return what_halves_change(model, small, logits=logits)


def _few_examples(batch: Any) -> Any:
    """Return shapes of the batch if it is small and even, else of `EXAMPLES` examples.

    A model may take its examples in groups, of which the batch itself has whole ones.
    """
    examples = _num_examples(batch)
    number = examples if examples <= _FEW and examples % 2 == 0 else EXAMPLES
    return {
        name: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype)
        for name, x in batch.items()
    }


def _with_few_tokens(model: Model, batch: Any, seq: int) -> Any:
    """Return shapes of a batch with open sizes of at most `seq`."""

    def few(name: str, x: Any) -> Any:
        declared = model.known_inputs.get(name)
        if declared is None or len(declared.sizes) != len(x.shape):
            return x
        pairs = zip(declared.logical_axes, declared.sizes, x.shape, strict=True)
        sizes = [
            min(size, seq) if axis not in (None, BATCH_DIM) and fixed is None else size
            for axis, fixed, size in pairs
        ]
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    return {name: few(name, x) for name, x in batch.items()}


def _warn(model: Model, why: Exception, *, is_judged: bool) -> None:
    names = ", ".join(repr(group.name) for group in model.groups)
    judged = (
        "is judged from its trace alone, which checks neither a derivative of your own "
        "nor whether the sums of head and blocks are sums over examples"
        if is_judged
        else "is not checked, as it asks for sums over the global batch"
    )
    warnings.warn(
        f"the model of blocks {names} cannot run in halves of a batch ({why}): whether "
        f"it treats every example by itself {judged}",
        stacklevel=2,
    )


def _about_examples(found: str) -> str:
    """Return a message about tokens reworded for examples, without its advice."""
    what, bracket, place = found.rpartition(" (")
    if not bracket:
        what, place = found, ""
    what, *_ = what.split(";")
    for word, other in (("token", "example"), ("the sequence", "the batch")):
        what = what.replace(word, other)
    return what + bracket + place


def _with_own_size(batch: Any, *others: Any) -> Any:
    """Return shapes with a multiple of the examples that is no other dim's size."""
    sizes = {size for x in jax.tree.leaves(others) for size in x.shape}
    sizes |= {size for x in dict(batch).values() for size in x.shape[1:]}
    [examples, *_] = [x.shape[0] for x in dict(batch).values()]
    times = itertools.count(_TIMES if examples < _MANY else 1)
    return _times(batch, next(n for n in times if n * examples not in sizes))


def _times(batch: Any, times: int) -> Any:
    """Return shapes of `times` the examples."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), x.dtype),
        dict(batch),
    )
