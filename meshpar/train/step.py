"""The sharded training step: one compiled program from a model and a layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, Layout
from meshpar.mesh import absent_mesh, make_mesh, platform_of
from meshpar.model import EXAMPLE, Batch, Model
from meshpar.parallel.norm import global_norm
from meshpar.parallel.pipeline.program import pipeline_of
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.parallel.placement import DTYPES, Placement, is_pipelined
from meshpar.parallel.program import LocalProgram
from meshpar.parallel.remat import check_residual_names
from meshpar.rule_presets import default_rules
from meshpar.rules import Rules
from meshpar.sharding import born_sharded, model_shardings
from meshpar.train.layer_order import layer_orders
from meshpar.train.refusals import (
    batch_refusal,
    layout_refusals,
    offload_refusal,
    rule_refusals,
)
from meshpar.train.state import TrainState, initial_state, state_shardings

Metrics = dict[str, jax.Array]
_TOKEN_ARRAYS = ("tokens", "targets", "weights")


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout | str,
    *,
    rules: Rules | None = None,
    devices: Sequence[jax.Device] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    max_grad_norm: float | None = None,
    gradient_dtype: Literal["fp32", "bf16"] = "fp32",
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """A training step of `model` laid out as `layout` says.

    Args:
        model: A model under the contract (`meshpar.model`).
        optimizer: Any optax optimizer whose state has the parameters' shapes.
        layout: The layout or its text form; a -1 absorbs the remaining devices.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
        devices: Devices to use; all of JAX's by default.
        mesh: A mesh with meshpar's six axes, instead of `devices`. On an
            `absent_mesh` the step can be audited for an absent target, not run.
        max_grad_norm: Scale gradients down to this global norm; None for no limit.
        gradient_dtype: In which gradients are added up over microbatches and devices;
            bf16 halves their memory and traffic, and loses small contributions.
        compiler_options: XLA's options for every program of the step, as `jax.jit`
            takes them.

    Raises:
        RuleError: A parameter cannot be laid out, or a rule for activations uses `data`
            or `fsdp` for anything but the batch.
        InputError: The layout does not fit the devices, or asks for what is not built,
            or `max_grad_norm` is not positive.

    Example:
        >>> import optax
        >>> from models.presets import build
        >>> step = make_train_step(build("test"), optax.adam(1e-3), "data=-1")
        >>> state = step.init(seed=0)
        >>> tokens = jnp.zeros((8, 16), jnp.int32)
        >>> batch = dict(tokens=tokens, targets=tokens, weights=jnp.ones((8, 16)))
        >>> state, metrics = step(state, batch)
        >>> sorted(metrics)
        ['grad_norm', 'loss', 'weight_sum']
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if mesh is None:
        mesh = make_mesh(layout, devices)
    layout = layout.resolve(mesh.size)
    for message in layout_refusals(layout).values():
        raise InputError(message)
    check_residual_names(model, layout.remat)
    if isinstance(mesh, Mesh):
        refused = offload_refusal(layout, platform_of(mesh))
        if refused is not None:
            raise InputError(refused)
    if gradient_dtype not in DTYPES:
        raise InputError(
            f"gradient_dtype={gradient_dtype!r}: must be one of {', '.join(DTYPES)}"
        )
    if gradient_dtype != "fp32" and not is_pipelined(layout):
        raise InputError(
            f"gradient_dtype={gradient_dtype!r}: is for gradients added up, but "
            f"layout {str(layout)!r} has one microbatch and one stage; leave it out"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InputError(
            f"max_grad_norm={max_grad_norm}: must be positive, or None for no limit"
        )
    rules = rules or default_rules(layout)
    for _, error in rule_refusals(rules, layout):
        raise error
    return TrainStep(
        model=model,
        optimizer=optimizer,
        layout=layout,
        rules=rules,
        mesh=mesh,
        platform=platform_of(mesh),
        max_grad_norm=max_grad_norm,
        gradient_dtype=gradient_dtype,
        compiler_options=compiler_options,
    )


class TrainStep:
    """A compiled training step; make it with `make_train_step`.

    Attributes:
        layout, rules, mesh, model, platform: What it was made from.
        shardings: `TrainState` of the sharding of every array.
        layer_orders: `TrainState` of where the layers of every array lie, for
            `Checkpoints`.
    """

    def __init__(
        self,
        *,
        model: Model,
        optimizer: optax.GradientTransformation,
        layout: Layout,
        rules: Rules,
        mesh: Mesh | AbstractMesh,
        platform: str,
        max_grad_norm: float | None,
        gradient_dtype: str,
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self._whole_model = model
        pipeline = pipeline_of(model, layout) if is_pipelined(layout) else None
        model = pipeline.model if pipeline else model
        self.model, self.layout, self.rules, self.mesh = model, layout, rules, mesh
        self.platform = platform
        self._optimizer, self._max_grad_norm = optimizer, max_grad_norm
        self._gradient_dtype = gradient_dtype
        placement = Placement(
            model=model,
            layout=layout,
            rules=rules,
            mesh=mesh,
            platform=platform,
            gradient_dtype=DTYPES[gradient_dtype],
        )
        self._program = (
            pipeline.program(placement)
            if pipeline
            else LocalProgram(placement=placement)
        )
        self.state_shapes = jax.eval_shape(
            lambda: initial_state(model, optimizer, jnp.uint32(0))
        )
        self.layer_orders = layer_orders(model, self.state_shapes, optimizer)
        param_shardings = model_shardings(model, mesh, rules)
        self.shardings = state_shardings(
            self.state_shapes, param_shardings, optimizer, mesh
        )
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._init = born_sharded(
            lambda seed: initial_state(model, optimizer, seed),
            self.shardings,
            compiler_options=compiler_options,
        )
        jit = functools.partial(jax.jit, compiler_options=compiler_options)
        metrics_sharding = NamedSharding(mesh, PartitionSpec())
        self._update_layout = dict(
            in_shardings=(self.shardings, self.batch_sharding),
            out_shardings=(self.shardings, metrics_sharding),
            donate_argnums=0,
        )
        self._step = jit(self._update, **self._update_layout)
        self._gradients = jit(
            self._program.loss_and_gradients,
            out_shardings=(metrics_sharding, metrics_sharding, param_shardings),
        )
        self._evaluate = jit(
            self._program.loss_sums,
            in_shardings=(param_shardings, self.batch_sharding),
            out_shardings=metrics_sharding,
        )
        self._logits = jit(
            self._program.logits,
            in_shardings=(param_shardings, self.batch_sharding),
            out_shardings=self.batch_sharding,
        )

    def init(self, seed: int) -> TrainState:
        """The first state, a function of `seed` alone; arrays are born in shards.

        Raises:
            InputError: `seed` is no whole number from 0 to 2**32 - 1.
        """
        if not 0 <= seed < 2**32:
            raise InputError(f"seed={seed}: must be at least 0 and below {2**32}")
        with jax.set_mesh(self.mesh):
            return self._init(np.uint32(seed))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated and cannot be used again.

        Args:
            state: From `init` or an earlier step.
            batch: `tokens`, `targets` and `weights`, each (global batch, seq), and
                what else the model reads, each with the example first.

        Returns:
            The new state, and fp32 scalars: `loss` and `grad_norm` (before any
            scaling) of the old parameters, and `weight_sum`.

        Raises:
            InputError: Shapes differ, or the global batch does not divide over the
                batch axes.
        """
        with jax.set_mesh(self.mesh):
            return self._step(state, self.place(batch))

    def loss_and_gradients(
        self, state: TrainState, batch: Batch
    ) -> tuple[jax.Array, Any]:
        """The loss of a batch and its fp32 gradients, laid out as the parameters.

        What a step would apply, before any scaling: for research code, and for
        comparing layouts.
        """
        with jax.set_mesh(self.mesh):
            loss, _, gradients = self._gradients(
                state.params, self.place(batch), state.step, state.seed
            )
        return loss, gradients

    def in_layer_order(self, tree: Any) -> Any:
        """Parameters or gradients whole on the host, their layers first to last.

        Under `stage` > 1 arrays hold the layers rank by rank, with places left empty
        where stages are of uneven size; here they have the model's own shapes.

        Args:
            tree: Arrays laid out as the parameters: `state.params`, gradients, or a
                tree in the optimizer's state.
        """
        return in_layer_order(self.model, tree)

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights of a batch, without dropout."""
        with jax.set_mesh(self.mesh):
            return self._evaluate(state.params, self.place(batch))

    def logits(self, state: TrainState, tokens: jax.Array) -> jax.Array:
        """fp32 logits (batch, seq, vocab) of tokens (batch, seq), without dropout.

        Raises:
            InputError: The model has no `logits`.
        """
        if self.model.logits is None:
            raise InputError("the model has no logits function; give Model logits=")
        with jax.set_mesh(self.mesh):
            batch = self.place({"tokens": tokens}, microbatches=1)
            return self._logits(state.params, batch)

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """The compiled step for a batch's shapes; arrays or `jax.ShapeDtypeStruct`s."""
        with jax.set_mesh(self.mesh):
            return self._step.lower(*self._argument_shapes(batch)).compile()

    def audit_subject(self, *arguments: Any, platform: str | None = None) -> Subject:
        """What `meshpar.audit` compiles and explains; see there.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
        """
        step = self if platform is None else self._without_devices(platform)
        return Subject(
            # JAX does not trace a jit with options of its own inside another.
            function=jax.jit(step._update, **step._update_layout),
            arguments=step._argument_shapes(arguments[-1]),
            mesh=step.mesh,
            platform=step.platform,
            weights={
                path: parameter.shape
                for path, parameter in self.model.flat_parameters().items()
            },
            layout=self.layout,
            sequence_axes=self.rules.mesh_axes("residual_seq")
            if "residual_seq" in self.rules.table
            else (),
        )

    def place(
        self, batch: Batch, *, microbatches: int | None = None
    ) -> dict[str, jax.Array]:
        """The batch on the devices, and each example's index beside it.

        Args:
            batch: As `__call__` takes it.
            microbatches: Parts that it is cut into; the layout's when absent.
        """
        self._check_batch(batch, microbatches)
        rows = len(next(iter(batch.values())))
        indexed = {EXAMPLE: np.arange(rows, dtype=np.uint32), **batch}
        return jax.device_put(indexed, self.batch_sharding)

    def check_batch(
        self, num_examples: int, name: str = "tokens", microbatches: int | None = None
    ) -> None:
        """Refuses a global batch that does not divide over the batch axes.

        Raises:
            InputError: It does not; both numbers are in the message.
        """
        refused = batch_refusal(self.layout, num_examples, name, microbatches)
        if refused is not None:
            raise InputError(refused)

    def _without_devices(self, platform: str) -> TrainStep:
        return TrainStep(
            model=self._whole_model,
            optimizer=self._optimizer,
            layout=self.layout,
            rules=self.rules,
            mesh=absent_mesh(self.layout),
            platform=platform,
            max_grad_norm=self._max_grad_norm,
            gradient_dtype=self._gradient_dtype,
            compiler_options=None,  # those of the present devices' compiler
        )

    def _argument_shapes(self, batch: Batch) -> tuple[TrainState, Batch]:
        shapes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
            ),
            dict(batch),
        )
        self._check_batch(shapes)
        rows = next(iter(shapes.values())).shape[0]
        shapes[EXAMPLE] = jax.ShapeDtypeStruct((rows,), jnp.uint32)
        return self.state_shapes, shapes

    def _check_batch(self, batch: Batch, microbatches: int | None = None) -> None:
        shapes = {name: tuple(array.shape) for name, array in batch.items()}
        first, shape = next(iter(shapes.items()))
        for name, other in shapes.items():
            if other[:1] != shape[:1] or (name in _TOKEN_ARRAYS and other != shape):
                raise InputError(
                    f"batch[{name!r}] has shape {other}, but batch[{first!r}] has "
                    f"shape {shape}; tokens, targets and weights are (examples, seq) "
                    "alike, other arrays have the example first"
                )
        self.check_batch(shape[0], first, microbatches)

    def _update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, weight_sum, gradients = self._program.loss_and_gradients(
            state.params, batch, state.step, state.seed
        )
        norm = global_norm(gradients, self.shardings.params, self.mesh)
        if self._max_grad_norm is not None:
            scale = jnp.minimum(1.0, self._max_grad_norm / (norm + 1e-6))
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        updates, opt_state = self._optimizer.update(
            gradients, state.opt_state, state.params
        )
        new_state = TrainState(
            step=state.step + 1,
            seed=state.seed,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
        )
        return new_state, {"loss": loss, "grad_norm": norm, "weight_sum": weight_sum}
