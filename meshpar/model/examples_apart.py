"""Whether a model treats every example by itself, read from a trace before it runs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.contract import Model
from meshpar.model.token_mixing import surely_mixes
from meshpar.model.tracing import one_layer_shapes, one_layer_state, traced_forward

_TIMES, _MANY = 13, 100
"""At least so many times the examples are traced with: as few sizes of a model are.

Examples are told from them by their number, which what divides the batch divides too.
Many of them are traced as they are: NumPy arrays of a model are built as large.
"""


def check_examples_first(model: Model, batch: Any) -> None:
    """Refuses a model that drops out along another dim than the examples.

    Where that dim happens to be as long as there are examples, one layout would take it
    and another not: so it is tried with two and three times as many.

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
    """Refuses a model that joins examples otherwise than by sums.

    Devices and microbatches have some examples of the batch each: what is not a sum
    over them, such as a mean's difference, a contrastive loss or noise of the batch's
    own shape, would be of these alone.

    Args:
        model: The model.
        batch: Arrays of a batch, or their shapes.
        layout: What splits the batch, in words.
        logits: Whether it is asked of `logits`, which a model has that calls this.

    Raises:
        InputError: It surely joins them; what only may is let through, and so is a
            model that asks for sums over the global batch itself.
    """
    params, state = one_layer_shapes(model), one_layer_state(model)
    shapes = _told_apart(batch, params, state)
    num = jax.tree.leaves(shapes)[0].shape[0]
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

    given = {name: (shape, 0) for name, shape in shapes.items()}
    numbers = jax.ShapeDtypeStruct((num,), jnp.uint32), 0
    found = surely_mixes(forward, num, [given, numbers], params, state)
    if found is None or asked:
        return
    function, instead = "a function of the model", "sums over examples alone"
    if logits:
        function, instead = "logits", "each example's own"
    raise InputError(
        f"layout {layout!r} gives devices or microbatches some examples each, but "
        f"{function} joins those that it has: {_of_examples(found)}; give {instead}, "
        "take scope.batch_sum for statistics and scope.key for noise, or leave the "
        "batch whole",
        key="model.joins_examples",
    )


def _of_examples(found: str) -> str:
    """What joins tokens, in words of examples; its place as it is."""
    what, bracket, place = found.rpartition(" (")
    if not bracket:
        what, place = found, ""
    for word, other in (("token", "example"), ("the sequence", "the batch")):
        what = what.replace(word, other)
    return what + bracket + place


def _told_apart(batch: Any, *others: Any) -> Any:
    """Shapes of so many times the examples that no other array has a dim as long."""
    sizes = {size for x in jax.tree.leaves(others) for size in x.shape}
    sizes |= {size for x in dict(batch).values() for size in x.shape[1:]}
    [examples, *_] = [x.shape[0] for x in dict(batch).values()]
    times = itertools.count(_TIMES if examples < _MANY else 1)
    return _times(batch, next(n for n in times if n * examples not in sizes))


def _times(batch: Any, times: int) -> Any:
    """Shapes of so many times the examples."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), x.dtype),
        dict(batch),
    )
