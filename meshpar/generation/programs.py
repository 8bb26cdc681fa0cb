"""The compiled programs of generation: a model laid out, its cache, one new token each.

One function makes both programs: prefill reads a chunk of a few examples' prompts,
decode one token of every example that may run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.checks.sequences import tokens_joined
from meshpar.errors import InputError, renamed
from meshpar.generation.agreement import check_takes_part
from meshpar.generation.cache_plan import CachePlan, check_memory, plan_cache
from meshpar.generation.forward import Forward, layer_by_layer, layer_specs, unstack
from meshpar.generation.paged_cache import Pools, Rows, Source
from meshpar.generation.sampling import Draws, Sampling, drawn
from meshpar.layout import MESH_AXES, Layout
from meshpar.machine.mesh import absent_mesh, make_mesh, mesh_platform
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, initial_values, is_parameter
from meshpar.parallel.pipeline.crossing import zero_arrays
from meshpar.parallel.pipeline.stages import Pipeline, pipeline_for
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.rules.sharding import path_name
from meshpar.train.layer_order import placed_values

_WHOLE = {
    "heads": "heads do not divide over {}: attention is whole on each device",
    "kv_heads": "key/value heads do not divide over {}: their weights are whole on "
    "each device, which keeps copies of the heads of its own queries",
}

PLAIN = Layout()
"""One device."""

_KEPT = (*MESH_AXES, "splits", "zero", "zero_axes", "precision", "param_dtype")


def generation_layout(layout: Layout | str) -> Layout:
    """Return the part of a layout that generation uses, without options of training.

    Sizes of mesh axes, uneven stages, microbatches of stages, what `fsdp` stores split
    and dtypes stay.

    Example:
        >>> str(generation_layout("data=2,tensor=2,sequence_parallel=true,remat=full"))
        'data=2,tensor=2'
    """
    layout = Layout.of(layout)
    kept = {name: getattr(layout, name) for name in _KEPT}
    if layout.stage > 1:
        # Layer by layer: a rank would hold all of its layers whole.
        kept |= {"microbatches": layout.microbatches, "fsdp_gather": "microbatch"}
    if layout.param_dtype != "fp32":
        kept["param_dtype"] = "bf16"
    if layout.chunks > 1:
        kept["splits"] = ()
    return Layout(**kept)


def with_whole_heads(
    model: Model, layout: Layout, rules: Rules
) -> tuple[Rules, tuple[str, ...]]:
    """Return rules that keep indivisible heads whole on each device, and notes.

    A training step refuses such heads; to generate, one has the model that there is.
    """
    notes = []
    for name, words in _WHOLE.items():
        mesh_axes = rules.table.get(name, ())
        shards = math.prod(layout.mesh_shape[axis] for axis in mesh_axes)
        uneven = {
            size
            for one in model.flat_parameters().values()
            for axis, size in zip(one.logical_axes, one.shape, strict=True)
            if axis == name and size % shards
        }
        if uneven:
            rules = rules.with_rules(**{name: None})
            axes = " x ".join(mesh_axes)
            notes.append(f"{min(uneven)} {words.format(f'{axes}={shards}')}")
    return rules, tuple(notes)


def _check_token_by_token(model: Model) -> None:
    joined = tokens_joined(model, cached=True)
    if joined is not None:
        raise InputError(
            "this model cannot generate token by token: a function joins tokens "
            f"otherwise than by meshpar's attention: {joined}",
            key="generation.joined_tokens",
        )


_COPIED_BYTES = 16e9
"""Bytes of weight copies, per layer, that unrolling must avoid to pay for itself.

SmolLM2-135M in fp32 on two CPU cores: 8.5 s more to compile 30 layers, 7.7 ms less for
each token, whose loop copies 14.2 MB a layer (jax 0.10)."""


def pays_unrolled(model: Model, layout: Layout, num_steps: int) -> bool:
    """Return True if a run is long enough for programs without a loop over layers.

    They take seconds more to compile, and spare every step a copy of the weights of
    the blocks.

    Args:
        model: The model.
        layout: Its layout.
        num_steps: Tokens that each slot is to generate.

    Example:
        >>> from meshpar.models.presets import build
        >>> model = build("smollm2-135m")
        >>> [pays_unrolled(model, PLAIN, steps) for steps in (64, 4096)]
        [False, True]
    """
    groups = jax.tree.leaves(model.split(model.parameters)[1], is_leaf=is_parameter)
    arrays = [stored_shape(one, layout.param_dtype) for one in groups]
    block_bytes = sum(one.size * one.dtype.itemsize for one in arrays)
    layers = sum(group.num_layers for group in model.groups)
    shards = layout.tensor * layout.expert
    return num_steps * block_bytes / shards >= layers * _COPIED_BYTES


@dataclass(frozen=True, kw_only=True)
class Programs:
    """A model that generates under a layout; make it with `Programs.from_model`.

    Args:
        placement: Where parameters lie.
        plan: The cache.
        pipeline: The stages, if there are any.
        unrolled: True if programs have no loop over layers.
        notes: Remarks for the user on how the model lies.
    """

    placement: Placement
    plan: CachePlan
    pipeline: Pipeline | None = None
    unrolled: bool = True
    notes: tuple[str, ...] = ()

    @classmethod
    def from_model(
        cls,
        model: Model,
        layout: Layout | str = PLAIN,
        *,
        slots: int,
        max_seq: int,
        page_size: int = 16,
        num_pages: int | None = None,
        chunk: int | None = None,
        max_source: int = 0,
        unrolled: bool = True,
        rules: Rules | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> Programs:
        """Lay a model and its cache out to generate tokens.

        Args:
            model: It attends through `meshpar.models.layers.attention.attend`.
            layout: Its layout; options of training are ignored.
            slots: Examples that run at once, over all devices.
            max_seq: Most tokens of an example, including the prompt.
            page_size: Tokens of a page of the cache.
            num_pages: Pages of a device; enough for all examples by default.
            chunk: Most prompt tokens that one program reads for each shard of the
                batch: of one prompt, or of several. 512 by default, and 128 if layers
                have sliding windows.
            max_source: Most source tokens of an example, for a model with an encoder.
            unrolled: True for no loop over layers, which would copy each layer's
                weights; compile time then grows with the number of layers.
            rules: Logical axis -> mesh axes; the layout's preset by default.
            mesh: The devices, or an `absent_mesh`.
            devices: Instead of a mesh.

        Raises:
            InputError: The model cannot generate, or the sizes do not fit.
            RuleError: A parameter cannot be laid out.
        """
        check_model(model)
        if model.logits is None:
            raise InputError(
                "the model has no logits function; give Model logits=",
                key="model.missing_logits",
            )
        layout = Layout.of(layout)
        if mesh is None:
            mesh = make_mesh(layout, devices)
        check_takes_part(mesh)
        layout = generation_layout(layout.resolve(mesh.size))
        rules = default_rules(layout) if rules is None else rules
        check_rules(rules)
        rules, notes = with_whole_heads(model, layout, rules)
        pipeline = pipeline_for(model, layout) if layout.stage > 1 else None
        arranged = model if pipeline is None else pipeline.model
        placement = Placement(
            model=arranged,
            layout=layout,
            rules=rules,
            mesh=mesh,
            platform=mesh_platform(mesh),
        )
        sizes = slots, max_seq, page_size, num_pages, chunk, max_source
        plan = plan_cache(placement, pipeline, *sizes)
        check_memory(plan, mesh)
        _check_token_by_token(model)
        return cls(
            placement=placement,
            plan=plan,
            pipeline=pipeline,
            unrolled=unrolled,
            notes=notes,
        )

    of: ClassVar[Any] = classmethod(
        renamed("Programs.of", cast(Any, from_model).__func__)
    )

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return cast(Mesh, self.placement.mesh)

    @property
    def num_prefill_rows(self) -> int:
        """Fewest examples of one prefill, over all devices: a microbatch each."""
        layout, here = self.plan.layout, self.plan.slots
        here //= layout.batch_shards
        return layout.batch_shards * min(layout.microbatches, here)

    def prefill_rows(self, num_tokens: int, waiting: int) -> int:
        """Return the rows of each shard of the batch in one prefill.

        The fewest times a power of two, so that few programs are compiled, of as many
        rows as have room in the plan's `prefill_tokens`.

        Args:
            num_tokens: Tokens of a row.
            waiting: Most prompts of a shard that a program could read.
        """
        shards = self.plan.layout.batch_shards
        rows = self.num_prefill_rows // shards
        most = min(self.plan.slots // shards, self.plan.prefill_tokens // num_tokens)
        while rows < waiting and 2 * rows <= most:
            rows *= 2
        return rows

    @cached_property
    def stacked_shardings(self) -> Any:
        """The sharding of every parameter, layers stacked."""
        return self._sharded(self.placement.specs(lambda stored: stored.spec))

    @cached_property
    def parameter_shardings(self) -> Any:
        """The sharding of every parameter at rest, as `at_rest` has them."""
        if not self.unrolled:
            return self.stacked_shardings
        model, ranks = self.placement.model, self.plan.layout.stage
        return self._sharded(
            layer_specs(model, self.placement.specs(lambda stored: stored.spec), ranks)
        )

    def at_rest(self, params: Any) -> Any:
        """Return the programs' parameters from stacked ones, which are deleted."""
        if not self.unrolled:
            return params
        model, ranks = self.placement.model, self.plan.layout.stage
        return unstack(model, params, self.parameter_shardings, ranks)

    def first_state(self, given: Any) -> Any:
        """Return the model's initial state with given values, layers in order."""
        model, shardings = self.placement.model, self.state_shardings

        def born() -> Any:
            return initial_values(model, jnp.uint32(0))[1]

        state = model.state
        if jax.tree.leaves(state, is_leaf=is_parameter):
            with jax.set_mesh(self.mesh):
                state = jax.jit(born, out_shardings=shardings)()
        placed = placed_values(given, model.state, shardings, partly=True)
        values = {path_name(path): x for path, x in jax.tree.leaves_with_path(placed)}
        return jax.tree.map_with_path(
            lambda path, drawn: values.get(path_name(path), drawn), state
        )

    @cached_property
    def state_shardings(self) -> Any:
        """The sharding of every array of the model's own state."""
        return self._sharded(self.placement.model_state_specs)

    @cached_property
    def empty_pools(self) -> Any:
        """Function of nothing that returns the pools, all zeros."""
        shapes = self.plan.shapes(self.mesh)
        shardings = jax.tree.map(lambda one: one.sharding, shapes)
        return jax.jit(lambda: zero_arrays(shapes), out_shardings=shardings)

    def advance(
        self, *, random: bool, truncated: bool, with_logits: bool = False
    ) -> Any:
        """Return the compiled function of the next token of each row.

            (params, state, pools, tokens, rows, draws) -> (tokens, logprobs, pools)

        For any number of rows and new tokens. The pools are donated.

        Args:
            random: True if a row may be drawn at random.
            truncated: True if unlikely tokens may be left out.
            with_logits: True to return fp32 (rows, vocab) logits before the pools.
        """
        return self._advances[random, truncated, with_logits]

    def audit_subject(
        self,
        *arguments: Any,
        platform: str | None = None,
        devices_per_host: int | None = None,
    ) -> Subject:
        """Return the subject of `meshpar.audit(programs, "decode", target=...)`.

        Args:
            arguments: `decode` for one token of every slot, drawn at random, or
                `prefill` for a chunk of prompts.
            platform: Kind of the absent devices, or None for the mesh's own.
            devices_per_host: Of no effect here.

        Raises:
            InputError: Another word.
        """
        slots, shards = self.plan.slots, self.plan.layout.batch_shards
        rows = shards * self.prefill_rows(self.plan.chunk, slots // shards)
        shapes = {
            "decode": (slots, 1, 0),
            "prefill": (rows, self.plan.chunk, self.plan.max_source),
        }
        if arguments[-1] not in shapes:
            raise InputError(
                f"audit(programs, {arguments[-1]!r}): give one of {', '.join(shapes)}",
                key="audit.unknown_program",
            )
        programs = self
        if platform is not None:
            mesh = absent_mesh(self.plan.layout)
            placement = replace(self.placement, mesh=mesh, platform=platform)
            programs = replace(self, placement=placement)
        return Subject(
            function=programs.advance(random=True, truncated=False),
            arguments=programs._argument_shapes(*shapes[arguments[-1]]),
            mesh=programs.mesh,
            platform=programs.placement.platform,
            weights={
                path: parameter.shape
                for path, parameter in self.placement.model.flat_parameters().items()
            },
            layout=self.plan.layout,
            notes=self.notes,
        )

    def _argument_shapes(
        self, rows: int, num_tokens: int, num_source: int
    ) -> tuple[Any, ...]:
        model, dtype = self.placement.model, self.plan.layout.param_dtype
        params = jax.tree.map(
            lambda one: stored_shape(one, dtype), model.parameters, is_leaf=is_parameter
        )
        if self.unrolled:
            ranks = self.plan.layout.stage
            params = jax.eval_shape(lambda x: layer_by_layer(model, x, ranks), params)
        state = jax.tree.map(lambda one: one.struct, model.state, is_leaf=is_parameter)
        ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
        tables = jax.ShapeDtypeStruct((rows, self.plan.table_pages), jnp.int32)
        tokens = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
        source = None
        if self.plan.max_source:
            read = jax.ShapeDtypeStruct((rows, num_source), jnp.int32)
            source = Source(read, ints, ints)
        draws = Draws.from_rows([Sampling()] * rows)
        rows_struct = Rows(tables, ints, ints, ints, source)
        draws = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draws))
        pools = self.plan.shapes(self.mesh)
        return params, state, pools, tokens, rows_struct, draws

    @cached_property
    def _advances(self) -> dict[tuple[bool, bool, bool], Any]:
        shapes = self.plan.shapes(self.mesh)
        pools = jax.tree.map(lambda one: one.sharding, shapes)
        here = NamedSharding(self.mesh, PartitionSpec())
        of_model = self.parameter_shardings, self.state_shardings
        return {
            (random, truncated, logits): jax.jit(
                partial(self._advanced, random, truncated, logits),
                in_shardings=(*of_model, pools, here, here, here),
                out_shardings=(*(here,) * (2 + logits), pools),
                donate_argnums=2,
            )
            for random, truncated, logits in itertools.product((False, True), repeat=3)
        }

    def _advanced(
        self,
        random: bool,
        truncated: bool,
        with_logits: bool,
        params: Any,
        state: Any,
        pools: list[Pools],
        tokens: jax.Array,
        rows: Rows,
        draws: Draws,
    ) -> tuple[Any, ...]:
        logits, pools = self._forward(params, state, pools, tokens, rows)
        positions = rows.starts + rows.counts
        found = drawn(logits, draws, positions, random=random, truncated=truncated)
        return (*found, logits, pools) if with_logits else (*found, pools)

    @cached_property
    def _forward(self) -> Forward:
        return Forward(
            placement=self.placement,
            plan=self.plan,
            arrangement=None if self.pipeline is None else self.pipeline.arrangement,
            unrolled=self.unrolled,
        )

    def _sharded(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


def stored_shape(parameter: Parameter, param_dtype: str) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a parameter at rest."""
    dtype = parameter.dtype
    if jnp.issubdtype(dtype, jnp.floating) and not parameter.in_full:
        dtype = PARAM_DTYPES[param_dtype]
    return jax.ShapeDtypeStruct(parameter.stacked_shape, dtype)
