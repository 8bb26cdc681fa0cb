"""The pipeline alone: loss and gradients of a user's own functions and pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, PartitionSpec

from meshpar.collectives import asked
from meshpar.errors import InputError, nearest
from meshpar.layout import FIXED_EXECUTIONS, REMATS
from meshpar.parallel.blocks import ScopeArrays
from meshpar.parallel.pipeline.crossing import STAGE
from meshpar.parallel.pipeline.microbatches import Microbatches, differentiable
from meshpar.parallel.pipeline.rank_layers import partitioning_hindrance
from meshpar.parallel.pipeline.reduction import along_first_dim, reduced_in_fp32
from meshpar.parallel.pipeline.stages import Arrangement, arrangement, cut, merge
from meshpar.parallel.pipeline.user_functions import (
    UserFunctions,
    batch_axes,
    check_batch,
    check_block_specs,
    check_mesh,
    check_parameters,
    check_x_spec,
    stacked_layers,
    token_arrays,
)
from meshpar.parallel.pipeline.work import Results
from meshpar.parallel.reduction import safe_inverse, scaled
from meshpar.parallel.zero import Stored
from meshpar.schedules import SCHEDULES, OwnSchedule, chosen_schedule
from meshpar.schedules.stage_splits import stage_sizes

Gradients = tuple[Any, Any, Any]


def with_own_derivative(run: Callable[..., tuple]) -> Callable[..., tuple]:
    """Return `run` with its own gradients as the derivative of its loss."""

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


_REMATS = tuple(name for name in REMATS if name != "selective")
"""`Layout`'s remats but the one that needs residuals named with `Scope.save`."""


def pipeline_value_and_grad(
    block: Callable[..., jax.Array],
    head: Callable[..., Any],
    *,
    mesh: Mesh,
    num_microbatches: int,
    embed: Callable[[Any, Any], jax.Array] | None = None,
    schedule: OwnSchedule = "1f1b",
    chunks: int = 1,
    splits: Sequence[int] = (),
    remat: str = "none",
    per_token: bool | tuple[Any, Any] = False,
    auxiliary: Mapping[str, float] | None = None,
    block_specs: Any = None,
    x_spec: Any = PartitionSpec(),  # noqa: B008, immutable
    execution: str = "uniform",
) -> Callable[[Any, Any, Any, Any], tuple[jax.Array, Gradients]]:
    """Return a function for loss and gradients of stacked blocks run as a pipeline.

        x_0 = embed(end_params, inputs)                 or the inputs themselves
        x_(l+1) = block(block_params[l], x_l)           l = 0 ... layers - 1
        loss = sum of loss_sum / sum of weight_sum      of head(end_params, x, targets)

    summed over microbatches and devices. The backward runs inside the loop of ticks,
    so that memory grows with the microbatches only as the inputs' own gradient does.

    Args:
        block: `(layer_params, x) -> x` of the same shape and dtype, an array or a tree
            of arrays with the example first; with a third parameter it is given where
            it runs: `at.layer`, `at.microbatch` and `at.inputs`, its microbatch of the
            inputs, without gradient.
        head: `(end_params, x, targets) -> (loss_sum, weight_sum)`, two scalars, or
            one, the mean over the examples it is given.
        mesh: Has a mesh axis `stage`, and may have `data` and `fsdp`, which split the
            batch. GSPMD partitions over all others, such as `tensor`. All are `Auto`.
        num_microbatches: Parts that each device's share of the batch runs in.
        embed: `(end_params, inputs) -> x`; without it the inputs are x, one array.
        schedule: A name in `meshpar.schedules.SCHEDULES`, a
            `meshpar.schedules.Schedule`, one order a rank, or a CSV file.
        chunks: Stages of one rank.
        splits: Layers of each stage; as even as possible when absent.
        remat: What the backward recomputes: `none`, `dots`, `full` (each block),
            `stage` or `stage_full` (each stage), as in `Layout`.
        per_token: Whether embed and head treat every token, dim 1 of x, by itself. Then
            the ranks share them, if the tokens divide over the ranks; otherwise each
            rank computes them in full. True: every array of inputs and targets of two
            dims or more has as many tokens as x in dim 1 and is cut along it, those of
            one dim are not. Or a pair of trees of booleans for (inputs, targets), or of
            prefixes such as `(True, {"ids": True, "image": False})`: True for what has
            tokens in dim 1, False for what embed and head are to see whole.
        auxiliary: Name of each auxiliary loss of the blocks -> its coefficient. A block
            then returns `(x, sums)`, a dict of a scalar for each, and the loss has all
            layers' `coefficient * sums` beside `loss_sum`; means, if head gives one.
        block_specs: Tree of the `PartitionSpec` of one layer's parameters over GSPMD's
            mesh axes; replicated when absent. With it each device sums gradients of its
            own part alone over `data` and `fsdp`.
        x_spec: How x lies over GSPMD's mesh axes, where it is split (sequence
            parallel); so that hops move each device's part alone. Or a tree of that.
        execution: `uniform` (lock step) or `divergent`, as in `Layout`.

    Returns:
        `(block_params, end_params, inputs, targets) -> (loss, gradients)`, with
        `block_params` a pytree of arrays (layers, ...), first to last; `end_params` any
        pytree; `inputs` and `targets` pytrees of arrays (examples, ...). `loss` is an
        fp32 scalar; `gradients` are those of block_params, end_params and inputs,
        shaped and typed as they are, None for arrays of integers. Blocks' parameters
        are split over `stage`; where stages are uneven or chunked, layers move to
        their ranks first, and gradients back. The function can be jitted, and the
        loss differentiated again: an outer derivative scales the gradients that are
        there. Those gradients themselves cannot be differentiated.

    Raises:
        InputError: When made: no `stage`, a mesh axis that is not `Auto`, no such
            schedule or execution, or one for other ranks or microbatches, an `x_spec`
            that names other mesh axes than GSPMD's, a divergent execution on a mesh
            that GSPMD partitions. When called: fewer layers than stages, splits
            that do not add up, a batch that does not divide over devices and
            microbatches, a block that changes the shape of x, specs of another tree
            than block_params, or of more dims than there are.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import AxisType, Mesh
        >>> mesh = Mesh(np.array(jax.devices()[:2]), ("stage",),
        ...             axis_types=(AxisType.Auto,))
        >>> value_and_grad = pipeline_value_and_grad(
        ...     lambda w, x: jnp.tanh(x @ w),
        ...     lambda scale, x, y: jnp.mean((scale * x - y) ** 2),
        ...     mesh=mesh,
        ...     num_microbatches=4,
        ... )
        >>> weights, x = 0.1 * jnp.ones((6, 8, 8)), jnp.ones((16, 8))
        >>> loss, (dw, dscale, dx) = value_and_grad(weights, jnp.ones(()), x, x)
        >>> dw.shape, dscale.shape, dx.shape
        ((6, 8, 8), (), (16, 8))
        >>> outer = lambda w: 10 * value_and_grad(w, jnp.ones(()), x, x)[0]
        >>> bool(jnp.allclose(jax.grad(outer)(weights), 10 * dw))
        True

    Reference: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"
        (1F1B); for the ends, Yeung et al. 2024.
    """
    check_mesh(mesh)
    check_x_spec(x_spec, mesh)
    if remat not in _REMATS:
        raise InputError(
            f"no remat {remat!r} here; {nearest(remat, _REMATS)}",
            key="layout.unknown_remat",
        )
    if execution not in FIXED_EXECUTIONS:
        raise InputError(
            f"no execution {execution!r}; {nearest(execution, FIXED_EXECUTIONS)}",
            key="layout.unknown_execution",
        )
    hindrance = partitioning_hindrance(mesh.shape)
    if execution == "divergent" and hindrance is not None:
        raise InputError(
            f"execution=divergent: {hindrance}, which must not run on some ranks "
            "alone; set execution=uniform",
            key="layout.divergent_permute",
        )
    ranks = mesh.shape[STAGE]
    named = SCHEDULES.get(schedule) if isinstance(schedule, str) else None
    if named is not None and named.updates_each_microbatch:
        raise InputError(
            f"schedule={schedule} updates weights between microbatches, and this "
            "function returns the gradients of one set of weights; take schedule=1f1b",
            key="schedule.changes_the_update",
        )
    chosen = chosen_schedule(
        schedule, num_ranks=ranks, num_microbatches=num_microbatches, chunks=chunks
    )

    def run(blocks: Any, ends: Any, inputs: Any, targets: Any) -> tuple:
        num_layers = stacked_layers(blocks)
        check_parameters(blocks, ends)
        check_block_specs(block_specs, blocks, mesh)
        check_batch(inputs, targets, mesh, num_microbatches)
        sizes = stage_sizes(num_layers, ranks, chunks, splits)
        functions = UserFunctions(
            block=block,
            head_sums=head,
            embed_inputs=embed,
            mesh=mesh,
            schedule=chosen,
            num_layers=num_layers,
            token_arrays=token_arrays(per_token, inputs, targets),
            auxiliary=dict(auxiliary or {}),
            remat=remat,
            x_spec=x_spec,
            divergent=execution == "divergent",
            block_stored=_stored(blocks, (STAGE,), block_specs),
            end_stored=_stored(ends, (), None),
        )
        placed = arrangement(chosen, sizes, [num_layers])
        return _run(functions, placed, blocks, ends, inputs, targets)

    return with_own_derivative(jax.jit(run))


def _run(
    functions: UserFunctions,
    placed: Arrangement,
    blocks: Any,
    ends: Any,
    inputs: Any,
    targets: Any,
) -> tuple[jax.Array, Gradients]:
    schedule, mesh = functions.schedule, functions.mesh
    axes = batch_axes(mesh)
    of_ranks, of_batch = PartitionSpec(STAGE), PartitionSpec(axes or None)
    everywhere = PartitionSpec()
    # The first layer also lies where there is none, so that no place is zero.
    at_places = np.maximum(placed.order(0), 0)

    def local(blocks: Any, *others: Any) -> tuple:
        blocks = cut(blocks, schedule.num_chunks)
        microbatches = _microbatches(functions, placed, blocks, *others)
        split_axes = tuple(axis for axis in (*axes, STAGE) if mesh.shape[axis] > 1)
        with asked("loss_sum"):
            weight_sum = lax.psum(microbatches.weight_sum(), split_axes)
        share = safe_inverse(weight_sum)
        executor = microbatches.executor(microbatches.work(of_loss=share), share)
        return _reduced(functions, split_axes, share, executor.loss_and_gradients())

    loss, of_blocks, of_ends, of_floats = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(of_ranks, everywhere, of_batch, of_batch),
        out_specs=(everywhere, of_ranks, everywhere, of_batch),
        axis_names={STAGE, *axes},
        check_vma=False,
    )(_taken(at_places, blocks), ends, inputs, targets)
    floats = iter(of_floats)
    of_inputs = jax.tree.map(
        lambda like: next(floats) if differentiable(like) else None, inputs
    )
    gradients = _taken(placed.places(0), of_blocks), of_ends, of_inputs
    return loss, _typed_as((blocks, ends, inputs), gradients)


def _microbatches(
    functions: UserFunctions,
    placed: Arrangement,
    blocks: Any,
    ends: Any,
    inputs: Any,
    targets: Any,
) -> Microbatches:
    """Return the microbatches of this device's arrays, the blocks' cut into chunks."""
    arrays = ScopeArrays(batch={"inputs": inputs, "targets": targets})
    return Microbatches(
        functions=functions,
        schedule=functions.schedule,
        arrangement=placed,
        weights=ends,
        params=[blocks],
        states=[{}],
        reduction=None,
        end_gradients=_gradient_sums(ends),
        gradients=[_gradient_sums(blocks)],
        cut=cut(arrays, functions.schedule.num_microbatches),
        random=None,
    )


def _gradient_sums(tree: Any) -> Any:
    """Return the shapes of gradients while they are added up: fp32, or complex."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, jnp.promote_types(x.dtype, jnp.float32)
        ),
        tree,
    )


def _typed_as(likes: Gradients, gradients: Gradients) -> Gradients:
    """Return gradients in the dtypes of `likes`; None stays None."""
    return jax.tree.map(
        lambda value, like: value if value is None else value.astype(like.dtype),
        gradients,
        likes,
        is_leaf=lambda node: node is None,
    )


def _reduced(
    functions: UserFunctions,
    split_axes: tuple[str, ...],
    share: jax.Array,
    results: Results,
) -> tuple[jax.Array, Any, Any, list[jax.Array]]:
    """Sum the loss and its gradients over the mesh axes that split the work."""
    with asked("loss_sum"):
        loss_sum, (auxiliary,) = lax.psum(
            (results.loss_sums.loss, results.auxiliary), split_axes
        )
    loss_sum += functions.group.weighted(auxiliary)
    (of_blocks,) = results.block_gradients
    of_inputs = merge(results.input_gradients)
    axes = batch_axes(functions.mesh)

    def reduced(stored: Any, gradients: Any) -> Any:
        return reduced_in_fp32(stored, gradients, split_axes)

    return (
        loss_sum * share,
        along_first_dim(reduced, functions.block_stored, merge(of_blocks)),
        reduced(functions.end_stored, results.end_gradients),
        along_first_dim(reduced, _stored(of_inputs, (axes,), None), of_inputs),
    )


def _stored(tree: Any, manual: tuple, automatic: Any) -> Any:
    """Return a tree of `Stored` for arrays whose first dims lie over `manual`."""

    def stored(value: Any, spec: PartitionSpec) -> Stored:
        everywhere = PartitionSpec(*manual, *spec)
        wide = jnp.promote_types(value.dtype, jnp.float32)
        return Stored(
            spec=everywhere,
            used_spec=everywhere,
            loop_spec=everywhere,
            gradient_spec=everywhere,
            compute_dtype=value.dtype,
            gradient_dtype=wide,
            sum_dtype=wide,
        )

    if automatic is None:
        return jax.tree.map(lambda value: stored(value, PartitionSpec()), tree)
    return jax.tree.map(stored, tree, automatic)


def _taken(layers: np.ndarray, tree: Any) -> Any:
    """Return those layers of every array; nothing moves if they are all, in order."""

    def taken(value: jax.Array) -> jax.Array:
        in_order = np.array_equal(layers, np.arange(len(value)))
        return value if in_order else value[layers]

    return jax.tree.map(taken, tree)
