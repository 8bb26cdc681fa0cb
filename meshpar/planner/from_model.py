"""Workloads and runs of a user's own models and steps, found by tracing them.

Nothing is compiled or computed. Only this file of the planner and `volume_traces` need
jax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from meshpar.audit.needs import MATMUL
from meshpar.errors import InputError
from meshpar.hardware.devices import DEVICES
from meshpar.hardware.platforms import platform_named
from meshpar.layout.layout import SCALING_EXECUTIONS
from meshpar.machine.mesh import SlowAxis, mesh_hosts, mesh_platform, slow_mesh_axes
from meshpar.model.contract import Model
from meshpar.model.inputs import open_size
from meshpar.model.parameter import is_parameter
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing_scope,
)
from meshpar.parallel.blocks import vjp_without
from meshpar.parallel.pipeline.stages import layer_costs
from meshpar.parallel.pipeline.traced_layer import in_dtype, mean_layer
from meshpar.parallel.placement import DTYPES
from meshpar.parallel.remat import rematerialised
from meshpar.planner.cost.pipeline_time import schedule_ticks
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_traffic import sent_in_a_step
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.workload.workload import (
    Cut,
    LiveBackward,
    Needed,
    TracedBlock,
    Workload,
)
from meshpar.trace.costs import Operand, matmul_flops, most_live
from meshpar.trace.walk import array_shape, equations
from meshpar.train.step import Batch, TrainStep

_POLICIES = ("none", "selective", "dots", "full")


def traced_workload(
    model: Model,
    *,
    seq: int,
    precision: str = "bf16",
    name: str = "traced",
) -> Workload:
    """Return the workload of a model, by tracing one block of each group.

    Nothing is computed. Sizes are those that parameters' logical axes name; a model
    without `heads` or `vocab` has one of them, which `tensor` does not split. FLOPs are
    those of its dots: with weights, which grow with the tokens, and between
    activations, which grow with the sequence too. Bytes are the residuals of `jax.vjp`
    without the parameters, under every remat policy.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        precision: Arithmetic of the blocks, as of a layout.
        name: Name in reports.

    Example:
        >>> from meshpar.models.presets import build
        >>> workload = traced_workload(build("tiny"), seq=64)
        >>> workload.num_parameters == build("tiny").num_parameters
        True
    """
    if not model.has_blocks:
        raise InputError(
            "a plan counts the work of a block and multiplies it, but from_loss was "
            "given no blocks; name the path of a list of equal blocks, such as "
            "blocks='layers'",
            key="model.no_blocks_to_plan",
        )
    # What fp8 matmuls leave between them is in 16 bits.
    dtype = DTYPES["bf16" if precision in SCALING_EXECUTIONS else precision]
    streams = in_dtype(traced_streams(model, 1, seq), dtype)
    sizes = _sizes(model, jax.tree.leaves(streams[0])[0].shape[-1])

    def trace(order: TokenOrder | None) -> list[_Group]:
        return [_trace(model, at, x, seq, order) for at, x in enumerate(streams)]

    block = _traced_block(model, trace, seq, dtype)
    tables = _tables(model)
    return Workload(
        name=name,
        layers=sum(group.num_layers for group in model.groups),
        seq=seq,
        tied=len(tables) == 1,
        logits_bytes=logits_bytes(model, seq=seq, vocab=sizes["vocab"], dtype=dtype),
        traced=block,
        **dict[str, Any](sizes),
    )


def _traced_block(
    model: Model,
    trace: Callable[[TokenOrder | None], list[_Group]],
    seq: int,
    dtype: Any,
) -> TracedBlock:
    """Return the mean block of the groups, per token."""
    layers = sum(group.num_layers for group in model.groups)
    ends, blocks = model.split(model.parameters)
    groups = trace(None)

    def needed(groups: list[_Group]) -> Needed:
        def per_token(groups: list[_Group]) -> _ByPolicy:
            tokens = seq * sum(group.num_layers for group in groups)
            return _ByPolicy(
                lambda remat: sum(one.residual_bytes(remat) for one in groups) / tokens
            )

        each = [per_token([group]) for group in groups]
        return Needed(per_token(groups), max(each, key=lambda kept: kept["none"]))

    # Attention to a sequence that devices share keeps no softmax.
    shared = TokenOrder(mesh_axis="context", num_ranks=1)
    return TracedBlock(
        parameters=_count(blocks) // layers,
        linear_flops=sum(group.linear_flops for group in groups) / layers / seq,
        mixing_flops=sum(group.mixing_flops for group in groups) / layers / seq,
        seq=seq,
        needed=needed(groups),
        kernel_needed=cache(lambda: needed(trace(shared))),
        backward=cache(partial(_most_live_backward, model, seq, dtype)),
        input_bytes=_array_bytes(traced_batch(model, 1, seq)) / seq,
        embedding_bytes=_embedding_bytes(model, seq, dtype) / seq,
        residual_dtype_bytes=jnp.dtype(dtype).itemsize,
        other_end_parameters=_count(ends) - sum(map(math.prod, _tables(model))),
        layer_costs=cache(partial(layer_costs, model)),
        cut=cache(partial(_mean_cut, model, seq, dtype)),
    )


def _sizes(model: Model, hidden: int) -> dict[str, int]:
    """Sizes by the logical axes of parameters; 1 for a missing one."""
    sizes: dict[str, int] = {}
    for parameter in model.flat_parameters().values():
        for axis, size in zip(parameter.logical_axes, parameter.shape, strict=True):
            if axis is not None:
                sizes.setdefault(axis, size)
    heads = sizes.get("heads", sizes.get("kv_heads", 1))
    return {
        "hidden": hidden,
        "vocab": sizes.get("vocab", 1),
        "heads": heads,
        "kv_heads": sizes.get("kv_heads", heads),
        "head_dim": sizes.get("head_dim", hidden // heads),
        "ffn": sizes.get("mlp", 4 * hidden),
    }


def _tables(model: Model) -> list[tuple[int, ...]]:
    """Shapes of the parameters outside the blocks that have axis `vocab`."""
    group_names = {group.name for group in model.groups}
    return [
        parameter.shape
        for path, parameter in model.flat_parameters().items()
        if path.split(".")[0] not in group_names and "vocab" in parameter.logical_axes
    ]


def _count(tree: Any) -> int:
    parameters = jax.tree.leaves(tree, is_leaf=is_parameter)
    return sum(
        math.prod(parameter.shape) * (parameter.num_layers or 1)
        for parameter in parameters
    )


def _array_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@dataclass(frozen=True)
class _Group:
    num_layers: int
    linear_flops: float
    mixing_flops: float
    residual_bytes: Callable[[str], float]


class _ByPolicy(Mapping[str, float]):
    """Bytes by remat policy, each traced when it is asked for."""

    def __init__(self, trace: Callable[[str], float]) -> None:
        self._trace = cache(trace)

    def __getitem__(self, remat: str) -> float:
        if remat not in _POLICIES:
            raise KeyError(remat)
        return self._trace(remat)

    def __iter__(self) -> Iterator[str]:
        return iter(_POLICIES)

    def __len__(self) -> int:
        return len(_POLICIES)


def _trace(model: Model, at: int, x: Any, seq: int, order: TokenOrder | None) -> _Group:
    group, dtype = model.groups[at], jax.tree.leaves(x)[0].dtype
    params = in_dtype(one_layer_shapes(model)[1][at], dtype)
    known = traced_batch(model, 1, seq), one_layer_state(model)[1][at]
    jaxpr = jax.make_jaxpr(
        lambda params, x, known: group.run(params, x, tracing_scope(*known, layer=0))
    )(params, x, known)
    num_weights, num_given = len(jax.tree.leaves(params)), len(jaxpr.jaxpr.invars)
    flops = matmul_flops(
        jaxpr,
        [Operand(is_weight=at < num_weights) for at in range(num_given)],
        while_length=1,
    )
    times = group.num_layers
    return _Group(
        times,
        flops.with_weights * times,
        flops.between_activations * times,
        cache(
            lambda remat: (
                times * _residual_bytes(group.run, remat, params, x, known, order)
            )
        ),
    )


def _residual_bytes(
    block: Callable,
    remat: str,
    params: Any,
    x: Any,
    known: tuple,
    order: TokenOrder | None,
) -> float:
    """Bytes of the residuals of one forward, with its input, without parameters."""
    call = rematerialised(block, remat)

    def make_scope(known: tuple) -> Scope:
        return tracing_scope(*known, layer=0, order=order)

    def kept(params: Any, x: Any, known: tuple) -> list[jax.Array]:
        def apply(params: Any, x: Any) -> Any:
            return call(make_scope, params, x, known)

        return vjp_without(apply, (params, x), params)[1].kept

    return _array_bytes(jax.eval_shape(kept, params, x, known))


def _most_live_backward(
    model: Model, seq: int, dtype: Any, weights_last: bool, scores: bool
) -> LiveBackward:
    """Fullest moment of a block's backward, without gradients of weights.

    Of the group of equal blocks that needs most.
    """
    without = None if scores else (seq, seq)
    streams = in_dtype(traced_streams(model, 1, seq), dtype)
    programs = (_backward(model, at, x, seq, dtype) for at, x in enumerate(streams))
    lives = (
        most_live(one, uncounted=num_weights, last=weights_last, without=without)
        for one, num_weights in programs
    )
    fullest = max(lives, key=lambda live: live.total_bytes)
    hidden = jax.tree.leaves(streams[0])[0].shape[-1]
    of_stream = fullest.bytes_by_width[hidden]
    return LiveBackward(fullest.total_bytes / seq, of_stream / seq)


def _backward(
    model: Model, at: int, x: Any, seq: int, dtype: Any
) -> tuple[ClosedJaxpr, int]:
    """Program of the backward of a group's block, and its number of parameters."""
    params = in_dtype(one_layer_shapes(model)[1][at], dtype)
    known = traced_batch(model, 1, seq), one_layer_state(model)[1][at]
    call = rematerialised(model.groups[at].run, "full")

    def apply(params: Any, x: Any, known: tuple) -> Any:
        return call(lambda known: tracing_scope(*known, layer=0), params, x, known)

    def backward(params: Any, x: Any, known: tuple, dy: Any) -> Any:
        return jax.vjp(lambda p, x: apply(p, x, known), params, x)[1](dy)

    dy = jax.eval_shape(apply, params, x, known)
    program = jax.make_jaxpr(backward)(params, x, known, dy)
    return program, len(jax.tree.leaves(params))


def _embedding_bytes(model: Model, seq: int, dtype: Any) -> int:
    """Bytes that the embedding of an example keeps, without parameters and batch."""

    def kept(params: Any, batch: Any, state: Any) -> list[jax.Array]:
        scope = tracing_scope(batch, state)

        def embed(params: Any) -> Any:
            return model.embed(params, scope.batch, scope)

        return vjp_without(embed, (params,), params)[1].kept

    params = in_dtype(one_layer_shapes(model)[0], dtype)
    given = params, traced_batch(model, 1, seq), one_layer_state(model)[0]
    program = jax.make_jaxpr(kept)(*given).jaxpr
    arrays = {id(one): one.aval for one in program.outvars}
    for one in program.invars:
        arrays.pop(id(one), None)
    return _array_bytes(list(arrays.values()))


def _mean_cut(model: Model, seq: int, dtype: Any, remat: str) -> Cut:
    """Return the mean cut of the layers' backwards, as a pipeline's step makes it."""
    layer = mean_layer(model, seq=seq, dtype=dtype, remat=remat)
    weights = layer.weight_flops
    uncut = 1 - layer.weight_grad_flops / weights if weights else 0.0
    return Cut(layer.stash_bytes / seq, max(0.0, uncut))


_EXAMPLE_BYTES = 2**33
"""Bytes of the logits of the traced tokens: more than a head makes at a time."""


def logits_bytes(model: Model, *, seq: int, vocab: int, dtype: Any) -> int:
    """Return the most bytes of fp32 logits at a time; 0 if those of all tokens.

    Args:
        model: A model under the contract.
        seq: Tokens of a sequence.
        vocab: Size of the vocabulary; 1 for a model without one.
        dtype: Dtype of the head's input and parameters.
    """
    if vocab == 1:
        return 0
    examples = -(-_EXAMPLE_BYTES // (4 * seq * vocab))
    params = in_dtype(model.split(model.parameters)[0], dtype)

    def head(params: Any, x: Any, state: Any, batch: Any) -> Any:
        scope = tracing_scope(batch, state)
        return model.loss_sums(params, x, scope.batch, scope)

    jaxpr = jax.make_jaxpr(head)(
        params,
        in_dtype(traced_streams(model, examples, seq)[-1], dtype),
        one_layer_state(model)[0],
        traced_batch(model, examples, seq),
    )
    matmuls = (
        array_shape(equation.outvars[0])
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == MATMUL
    )
    most = max((math.prod(shape) for shape in matmuls if vocab in shape), default=0)
    return 0 if most >= examples * seq * vocab else 4 * most


def planned_run(step: TrainStep, batch: Batch) -> Run:
    """Return the planner's run of a step's own model and layout."""
    layout = step.layout
    global_batch = next(iter(batch.values())).shape[0]
    seq = open_size(step.model.known_inputs, batch)
    ticks = None
    if step.schedule and layout.stage > 1:
        ticks = schedule_ticks(step.schedule, divergent=layout.divergent)
    workload = traced_workload(step.model_as_given, seq=seq, precision=layout.precision)
    return Run(
        workload=workload,
        cluster=_cluster(step),
        layout=layout,
        execution=MESHPAR,
        global_batch=global_batch,
        seq=seq,
        stage_blocks=step.layers_of_stages or (workload.layers,),
        ticks=ticks,
    )


def _cluster(step: TrainStep) -> Cluster:
    """Cluster of as many devices as the step has; only their platform matters."""
    platform = mesh_platform(step.mesh)
    fused = platform_named(platform).fused_attention
    if fused == "cudnn" and jax.default_backend() != platform:
        # An absent one has no fused attention (`meshpar.models.layers.attention`).
        platform = ""
    device = replace(DEVICES["h100-80gb"], platform=platform)
    return Cluster(device=device, devices_per_host=step.layout.num_devices)


def slow_links(step: TrainStep, batch: Batch) -> tuple[SlowAxis, ...]:
    """Return the mesh axes on a slower link than necessary, the worst first.

    By the planner's count of the bytes that each sends; `audit` counts what the
    compiled program sends.

    Args:
        step: From `make_train_step`, on devices.
        batch: Arrays or their shapes.
    """
    mesh = step.mesh
    if not isinstance(mesh, Mesh) or len(set(mesh_hosts(mesh))) == 1:
        return ()
    sent: Counter[tuple[str, ...]] = Counter()
    for one in sent_in_a_step(planned_run(step, batch)):
        sent[one.mesh_axes] += round(one.wire_bytes)
    return slow_mesh_axes(mesh, sent)
