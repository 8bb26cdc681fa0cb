"""A function that returns a loss and its gradients, under an outer derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from meshpar.errors import InputError
from meshpar.parallel.reduction import scaled

Gradients = tuple[Any, Any, Any]


def with_own_derivative(run: Callable[..., tuple]) -> Callable[..., tuple]:
    """`run`, whose loss has its own gradients as its derivative."""

    @jax.custom_vjp
    def value_and_grad(
        block_params: Any, end_params: Any, inputs: Any, targets: Any
    ) -> tuple[jax.Array, Gradients]:
        return run(block_params, end_params, inputs, targets)

    def forward(*arguments: Any) -> tuple:
        if any(leaf.perturbed for leaf in jax.tree.leaves(arguments[3])):
            raise InputError(
                "the pipeline's loss is differentiated with respect to its targets, "
                "which get no gradient; pass them as inputs, or lax.stop_gradient them",
                key="model.gradient_of_targets",
            )
        values = jax.tree.map(lambda leaf: leaf.value, arguments)
        loss, gradients = run(*values)
        return (loss, gradients), gradients

    def backward(gradients: Gradients, cotangents: tuple) -> tuple:
        of_loss, of_gradients = cotangents
        if not all(
            isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(of_gradients)
        ):
            raise InputError(
                "the gradients of a pipeline are differentiated again, which its "
                "backward does not keep enough for; differentiate its loss only",
                key="model.second_derivative",
            )
        if isinstance(of_loss, SymbolicZero):
            of_loss = jnp.zeros(of_loss.shape, of_loss.dtype)
        return (*scaled(gradients, of_loss), None)

    value_and_grad.defvjp(forward, backward, symbolic_zeros=True)
    return value_and_grad
