"""Muon: momentum whose matrices are orthogonalized, each by the device that owns it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from optax.contrib import MuonDimensionNumbers

from meshpar.parallel.matrices import OnMatrices, on_matrices

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: float | None = None,
) -> optax.GradientTransformation:
    """Return Muon, with the arguments, the state and the arithmetic of optax's.

    In a training step of `meshpar.make_train_step` the momentum lies as its parameter,
    and each matrix, of every layer, is orthogonalized by one device: its owner. Of a
    matrix of `P` values that `n` devices split, each P (n-1)/n go to the owner and
    back, in fp32. Owners have equally many FLOPs, over all shapes and layers together.
    What is no matrix is updated by AdamW.

    Args:
        learning_rate: As in `optax.contrib.muon`, and so are all others.
        ns_coeffs: Coefficients of the Newton-Schulz iteration.
        ns_steps: Its iterations.
        beta: Share of the momentum that an update keeps.
        eps: Added to norms.
        weight_decay: Of matrices, times the learning rate.
        weight_decay_mask: Which of them decay.
        mu_dtype: Dtype of the momentum.
        nesterov: Whether the momentum is Nesterov's.
        adaptive: Whether updates are scaled by the dual norm of the momentum.
        preconditioning: What is done before the iteration.
        adam_b1: AdamW's decay of the first moment.
        adam_b2: AdamW's decay of the second moment.
        adam_eps_root: Added to AdamW's second moment before its root.
        adam_weight_decay: Weight decay of AdamW.
        adam_learning_rate: Learning rate of AdamW; that of Muon when absent.
        muon_weight_dimension_numbers: Inputs and outputs of each matrix, in a tree or a
            function of the parameters; None for all parameters of two dims.
        consistent_rms: Scale of an update whose size does not depend on the shape.

    Example:
        >>> params = {"matrix": jnp.eye(4), "bias": jnp.ones(4)}
        >>> optimizer, same = muon(1e-2), contrib.muon(1e-2)
        >>> found, _ = optimizer.update(params, optimizer.init(params), params)
        >>> wanted, _ = same.update(params, same.init(params), params)
        >>> bool(jnp.allclose(found["matrix"], wanted["matrix"]))
        True

    Reference: Jordan et al. 2024, Muon; Liu et al. 2025, Muon is Scalable for LLM
    Training.
    """
    coefficients = _coefficients(ns_coeffs)
    chosen = _Chosen(muon_weight_dimension_numbers)
    matrices = optax.chain(
        _scale_by_muon(
            contrib.scale_by_muon(coefficients, ns_steps, mu_dtype=mu_dtype).init,
            chosen,
            NewtonSchulz(steps=ns_steps, preconditioning=preconditioning),
            beta=beta,
            eps=eps,
            mu_dtype=mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
        ),
        _scale_by_shape(chosen, consistent_rms),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    others = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        nesterov=nesterov,
    )
    return optax.partition({"muon": matrices, "adam": others}, chosen.labels)


@dataclass(frozen=True)
class NewtonSchulz:
    """Orthogonalization of one matrix, as optax computes it.

    Args:
        steps: Iterations.
        preconditioning: What comes before them.
        dims: Its dims that are inputs, and those that are outputs.
    """

    steps: int
    preconditioning: Preconditioning
    dims: MuonDimensionNumbers = MuonDimensionNumbers()

    def __call__(
        self, matrix: jax.Array, coefficients: jax.Array, eps: jax.Array
    ) -> jax.Array:
        """Return the matrix with singular values of about 1."""
        # Without momentum optax's transformation is the orthogonalization alone.
        scale = contrib.scale_by_muon(
            ns_steps=self.steps,
            beta=0.0,
            eps=eps.astype(matrix.real.dtype),
            nesterov=False,
            preconditioning=self.preconditioning,
            weight_dimension_numbers=self.dims,
        )
        state = contrib.MuonState(
            jnp.zeros((), jnp.int32), jnp.zeros_like(matrix), coefficients
        )
        return scale.update(matrix, state)[0]

    def on_array(
        self, shape: tuple[int, ...], dims: MuonDimensionNumbers
    ) -> OnMatrices:
        """Return the operation on an array, and what it costs.

        With m rows and n columns, m <= n, an iteration has two products of m m n
        multiplies and one of m m m.
        """
        inputs, outputs = (_dims(axes, shape) for axes in dims)
        own = sorted((*inputs, *outputs))
        batch = tuple(dim for dim in range(len(shape)) if dim not in own)
        moved = MuonDimensionNumbers(
            tuple(map(own.index, inputs)), tuple(map(own.index, outputs))
        )
        m, n = sorted(fans(shape, dims))
        flops = self.steps * 2 * (2 * m * m * n + m**3)
        return OnMatrices(replace(self, dims=moved), batch, flops)


def fans(shape: tuple[int, ...], dims: MuonDimensionNumbers) -> tuple[int, int]:
    """Return the rows and columns of a matrix: its inputs and its outputs."""
    rows, columns = (
        math.prod(shape[dim] for dim in _dims(axes, shape)) for axes in dims
    )
    return rows, columns


def _dims(axes: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(axis % len(shape) for axis in axes)


@dataclass(frozen=True)
class _Chosen:
    """Parameters that are matrices, as `muon_weight_dimension_numbers` has them."""

    given: Any

    def dims(self, params: Any) -> Any:
        """Return the `MuonDimensionNumbers` of each parameter; None for no matrix."""
        given = self.given(params) if callable(self.given) else self.given
        if given is None:
            return jax.tree.map(
                lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params
            )
        repeat = lambda dims, below: jax.tree.map(lambda _: dims, below)  # noqa: E731
        return jax.tree.map(repeat, given, params, is_leaf=_is_choice)

    def labels(self, params: Any) -> Any:
        """Return `muon` or `adam` for each parameter."""
        return jax.tree.map(
            lambda dims: "adam" if dims is None else "muon",
            self.dims(params),
            is_leaf=_is_choice,
        )

    def map(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Return `function(dims, *leaves)` for each matrix of some trees."""
        return jax.tree.map(function, self.dims(trees[0]), *trees, is_leaf=_is_choice)


def _is_choice(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def _coefficients(given: Any) -> Any:
    """Return coefficients, those of optax if given by name."""
    if not isinstance(given, str):
        return given
    state = contrib.muon(0.0, ns_coeffs=given).init(jnp.zeros((1, 1)))
    return optax.tree_utils.tree_get(state, "ns_coeffs")


def _scale_by_muon(
    init: Callable[[Any], Any],
    chosen: _Chosen,
    orthogonalize: NewtonSchulz,
    *,
    beta: float,
    eps: float,
    mu_dtype: Any,
    nesterov: bool,
    adaptive: bool,
) -> optax.GradientTransformation:
    """Return optax's `scale_by_muon`, its matrices by `on_matrices`."""
    tree = optax.tree_utils

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        mu = tree.tree_update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            found = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g,
                tree.tree_bias_correction(mu, beta, optax.safe_increment(count)),
                tree.tree_bias_correction(updates, beta, count),
            )
        else:
            found = tree.tree_bias_correction(mu, beta, count)
        operations = chosen.map(
            lambda dims, x: orthogonalize.on_array(x.shape, dims), found
        )
        arrays, treedef = jax.tree.flatten(found)
        shared = state.ns_coeffs, jnp.asarray(eps, jnp.float32)
        results = on_matrices(jax.tree.leaves(operations), arrays, *shared)
        if adaptive:
            pairs = zip(arrays, results, strict=True)
            results = [jnp.sum(x.conj() * y) * y for x, y in pairs]
        state = contrib.MuonState(count, tree.tree_cast(mu, mu_dtype), state.ns_coeffs)
        return treedef.unflatten(results), state

    return optax.GradientTransformation(init, update)


def _scale_by_shape(
    chosen: _Chosen, consistent_rms: float | None
) -> optax.GradientTransformation:
    """Return the scale of updates by the shapes of their matrices."""

    def scaled(dims: MuonDimensionNumbers, x: jax.Array) -> jax.Array:
        rows, columns = fans(x.shape, dims)
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, columns / rows)) * x
        return jnp.sqrt(jnp.maximum(rows, columns)) * consistent_rms * x

    return optax.stateless(lambda updates, params: chosen.map(scaled, updates))
