"""What of a model joins tokens, traced on those that one device has of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM, logical_sizes, shapes_of
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    run_on,
    traced_forward,
    tracing,
)
from meshpar.parallel.sequence import sequence_dims
from meshpar.trace.token_counts import ALIKE
from meshpar.trace.token_mixing import mixes_tokens


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is asked of a model.

    Args:
        model: The model.
        names: Of the arrays that its batch has.
        cached: Whether attention is what a cache answers, not what devices share.
        ends_only: Whether the blocks are left out: of the ranks of a pipeline.
        of_logits: Whether `logits` comes last, not the head.
        counts: Whether the head's sums may count the tokens at hand.
    """

    model: Model
    names: tuple[str, ...]
    cached: bool = False
    ends_only: bool = False
    of_logits: bool = False
    counts: bool = True

    @property
    def mesh_axis(self) -> str:
        """Whose devices share the tokens."""
        return "stage" if self.ends_only else "context"

    @property
    def examples(self) -> int:
        """That it is traced on.

        Of one a reshape that merges examples and tokens leaves the tokens a dim by
        themselves, which can be followed.
        """
        return 1 if self.ends_only or self.of_logits else 3


def what_joins(probe: Probe, num_tokens: int) -> str | None:
    """The operation of a model that joins tokens; None if none does.

    Args:
        probe: The model, and what of it is traced.
        num_tokens: Of the sequences that it is traced on.

    Raises:
        InputError: It cannot be traced.
    """
    axis = probe.mesh_axis
    with tracing(f"the model cannot be traced as devices of {axis!r} run it"):
        if probe.of_logits:
            return _in_logits(probe, num_tokens)
        if probe.ends_only:
            return _in_ends(probe, num_tokens)
        return _followed(probe, num_tokens, _as_it_is, sums=True, counts=probe.counts)


def _as_it_is(found: Any, positions: jax.Array) -> Any:
    return found


def _followed(
    probe: Probe,
    num_tokens: int,
    then: Callable[[Any, jax.Array], Any],
    **options: bool,
) -> str | None:
    """What joins tokens up to `then`, of what the model gives and positions."""
    whole, share = (
        Hand.of(probe, num_tokens, at_hand)
        for at_hand in (num_tokens, max(num_tokens // 2, 1))
    )
    return mixes_tokens(
        whole.then(then),
        num_tokens,
        whole.tokens,
        one_layer_shapes(probe.model),
        one_layer_state(probe.model),
        fewer=(share.then(then), share.tokens),
        **options,
    )


def _in_logits(probe: Probe, num_tokens: int) -> str | None:
    found = _followed(probe, num_tokens, _as_it_is, lenient=True)
    if found is not None:
        return found
    # Of a sum over tokens only what is linear can be taken.
    if _followed(probe, num_tokens, lambda found, _: jax.tree.map(jnp.abs, found)):
        return "its result is a sum over tokens, of which each device has a part"
    return None


def _in_ends(probe: Probe, num_tokens: int) -> str | None:
    found = _followed(probe, num_tokens, _as_it_is, lenient=True)
    if found is not None:
        return found
    if any(_is_alike(probe, num_tokens, at) for at in range(2)):
        return ALIKE
    return None


def _is_alike(probe: Probe, num_tokens: int, at: int) -> bool:
    """Whether one of the head's sums is neither of tokens nor of how many there are."""

    def one(found: Any, positions: jax.Array) -> Any:
        return found[0][at]

    def beside_tokens(found: Any, positions: jax.Array) -> Any:
        return found[0][at] * positions

    if _followed(probe, num_tokens, one, sums=True) is None:
        return False
    # Tokens that meet what depends on their number are refused.
    return _followed(probe, num_tokens, beside_tokens) is None


@dataclass(frozen=True, kw_only=True)
class Hand:
    """A model on the tokens that one device has of each sequence.

    Args:
        probe: The model, and what of it is traced.
        order: In which a probe has them.
        batch: Name -> (shape, dim of its tokens or None).
        positions: Of the tokens.
    """

    probe: Probe
    order: TokenOrder
    batch: dict[str, tuple[jax.ShapeDtypeStruct, int | None]]
    positions: jax.ShapeDtypeStruct

    @classmethod
    def of(cls, probe: Probe, seq: int, num_tokens: int) -> Hand:
        """So many tokens of sequences of `seq`."""
        inputs = {
            name: replace(one, optional=False)
            for name, one in probe.model.known_inputs.items()
            if name in probe.names
        }
        sizes = {**dict.fromkeys(logical_sizes(inputs), seq), BATCH_DIM: probe.examples}
        return cls(
            probe=probe,
            order=TokenOrder(
                mesh_axis=probe.mesh_axis,
                num_ranks=1,
                lengths=((num_tokens, seq),),
                cached=probe.cached,
            ),
            batch={
                name: _at_hand(shape, _token_dims(probe, name, shape), num_tokens)
                for name, shape in shapes_of(inputs, sizes).items()
            },
            positions=jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        )

    @property
    def tokens(self) -> list:
        """What `forward` is given first, with the dims of tokens."""
        return [self.batch, (self.positions, 0)]

    def forward(self, tokens: list, params: Any, state: Any) -> Any:
        """What the model gives: its sums, or its logits."""
        batch, positions = tokens
        probe = self.probe
        shapes = {name: shape for name, (shape, _) in self.batch.items()}
        fields: dict[str, Any] = {
            "ends_only": probe.ends_only,
            "run": run_on,
            "order": replace(self.order, probe=positions),
        }
        of_logits = probe.of_logits
        once, *_ = traced_forward(
            probe.model, shapes, head=not of_logits, logits=of_logits, **fields
        )
        return once(params, state, batch)

    def then(self, function: Callable[[Any, jax.Array], Any]) -> Callable[..., Any]:
        """`forward`, and a function of what it gives and the positions."""

        def forward(tokens: list, params: Any, state: Any) -> Any:
            return function(self.forward(tokens, params, state), tokens[1])

        return forward


def _token_dims(
    probe: Probe, name: str, shape: jax.ShapeDtypeStruct
) -> tuple[int, ...]:
    """The dims that devices share out: `seq` alone, where ranks of a pipeline do."""
    if not probe.ends_only:
        return sequence_dims(probe.model, name, shape)
    dim = probe.model.seq_dim(name)
    return () if dim is None else (dim,)


def _at_hand(
    shape: jax.ShapeDtypeStruct, dims: tuple[int, ...], num_tokens: int
) -> tuple[jax.ShapeDtypeStruct, int | None]:
    """The shape with so many tokens, and their dim."""
    given = tuple(
        num_tokens if dim in dims else size for dim, size in enumerate(shape.shape)
    )
    return jax.ShapeDtypeStruct(given, shape.dtype), next(iter(dims), None)
