"""The compiled programs of generation: a model laid out, its cache, one new token each.

One function makes both: prefill takes a chunk of a few examples' prompts, decode one
token of every example that may run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.checks.sequences import tokens_joined
from meshpar.errors import InputError
from meshpar.generation.agreement import check_takes_part
from meshpar.generation.cache_memory import check_memory
from meshpar.generation.cache_plan import CachePlan, plan_of
from meshpar.generation.forward import Forward
from meshpar.generation.layer_by_layer import given_up, layer_by_layer, layer_specs
from meshpar.generation.layouts import PLAIN, generation_layout, with_whole_heads
from meshpar.generation.sampling import Draws, Sampling, drawn
from meshpar.layout import Layout
from meshpar.machine.mesh import absent_mesh, make_mesh, mesh_platform
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, initial_values, is_parameter
from meshpar.parallel.paged_cache import Pools, Rows, Source
from meshpar.parallel.pipeline.program import Pipeline, pipeline_of
from meshpar.parallel.placement import PARAM_DTYPES, Placement
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.rules.sharding import path_name
from meshpar.train.layer_order import placed_values


@dataclass(frozen=True, kw_only=True)
class Programs:
    """A model that generates under a layout; make it with `Programs.of`.

    Args:
        placement: Where parameters lie.
        plan: Where what is kept of tokens lies.
        pipeline: The stages, if there are any.
        unrolled: Whether programs have no loop over layers.
        notes: What a user should know of how it lies.
    """

    placement: Placement
    plan: CachePlan
    pipeline: Pipeline | None = None
    unrolled: bool = True
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: Model,
        layout: Layout | str = PLAIN,
        *,
        slots: int,
        max_seq: int,
        page_size: int = 16,
        num_pages: int | None = None,
        chunk: int = 128,
        max_source: int = 0,
        unrolled: bool = True,
        rules: Rules | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> Programs:
        """What generates tokens of a model.

        Args:
            model: It attends through `meshpar.models.layers.attention.attend`.
            layout: How it lies; what is for training alone is left out.
            slots: Examples that run at once, over all devices.
            max_seq: Tokens that each may have, prompt among them.
            page_size: Tokens of a page of the cache.
            num_pages: Pages of a device; enough for all examples when absent.
            chunk: Tokens of a prompt that one program takes.
            max_source: Tokens that the source of each may have, of a model with an
                encoder.
            unrolled: Without a loop over layers, which would copy each one's weights;
                a program then takes the longer to compile the more layers there are.
            rules: Logical axis -> mesh axes; the layout's preset when absent.
            mesh: The devices, or none of them (`absent_mesh`).
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
        pipeline = pipeline_of(model, layout) if layout.stage > 1 else None
        arranged = model if pipeline is None else pipeline.model
        placement = Placement(
            model=arranged,
            layout=layout,
            rules=rules,
            mesh=mesh,
            platform=mesh_platform(mesh),
        )
        sizes = slots, max_seq, page_size, num_pages, chunk, max_source
        plan = plan_of(placement, pipeline, *sizes)
        check_memory(plan, mesh)
        _check_token_by_token(model)
        return cls(
            placement=placement,
            plan=plan,
            pipeline=pipeline,
            unrolled=unrolled,
            notes=notes,
        )

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return cast(Mesh, self.placement.mesh)

    @property
    def rows_of_prefill(self) -> int:
        """Examples of one prefill, over all devices: a microbatch each of a shard."""
        layout, here = self.plan.layout, self.plan.slots
        here //= layout.batch_shards
        return layout.batch_shards * min(layout.microbatches, here)

    @cached_property
    def stacked_shardings(self) -> Any:
        """The sharding of every parameter, layers stacked."""
        return self._sharded(self._stacked_specs)

    @cached_property
    def parameter_shardings(self) -> Any:
        """The sharding of every parameter at rest, as `at_rest` has them."""
        if not self.unrolled:
            return self.stacked_shardings
        model, ranks = self.placement.model, self.plan.layout.stage
        return self._sharded(layer_specs(model, self._stacked_specs, ranks))

    def at_rest(self, params: Any) -> Any:
        """What the programs take of stacked parameters; the stacks are given up."""
        if not self.unrolled:
            return params
        model, ranks = self.placement.model, self.plan.layout.stage
        return given_up(model, params, self.parameter_shardings, ranks)

    def first_state(self, given: Any) -> Any:
        """The model's state as it begins, but for what is given, layers in order."""
        model, shardings = self.placement.model, self.state_shardings

        def born() -> Any:
            return initial_values(model, jnp.uint32(0))[1]

        with jax.set_mesh(self.mesh):
            state = jax.jit(born, out_shardings=shardings)()
        placed = placed_values(given, model.state, shardings, partly=True)
        known = {path_name(path): x for path, x in jax.tree.leaves_with_path(placed)}
        return jax.tree.map_with_path(
            lambda path, drawn: known.get(path_name(path), drawn), state
        )

    @cached_property
    def state_shardings(self) -> Any:
        """The sharding of every array of the model's own state."""
        return self._sharded(self.placement.model_state_specs)

    @cached_property
    def empty_pools(self) -> Any:
        """() -> the pools, zeros."""
        shapes = self.plan.shapes(self.mesh)

        def born() -> list[Pools]:
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)

        shardings = jax.tree.map(lambda one: one.sharding, shapes)
        return jax.jit(born, out_shardings=shardings)

    def advance(
        self, *, random: bool, truncated: bool, with_logits: bool = False
    ) -> Any:
        """(params, state, pools, tokens, rows, draws) -> (tokens, logprobs, pools).

        The compiled function for any number of rows and new tokens: the next token of
        each row. The pools are donated.

        Args:
            random: Whether a row may be drawn at random.
            truncated: Whether unlikely tokens may be left out.
            with_logits: Whether fp32 (rows, vocab) logits come before the pools.
        """
        return self._advances[random, truncated, with_logits]

    def audit_subject(self, *arguments: Any, platform: str | None = None) -> Subject:
        """What `meshpar.audit(programs, "decode", target=...)` compiles and explains.

        Args:
            arguments: `decode` for one token of every slot, drawn at random, or
                `prefill` for a chunk of prompts.
            platform: Kind of the absent devices, or None for the mesh's own.

        Raises:
            InputError: Another word.
        """
        shapes = {
            "decode": (self.plan.slots, 1, 0),
            "prefill": (self.rows_of_prefill, self.plan.chunk, self.plan.max_source),
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
        model, params = self.placement.model, self._stacked_structs
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
        draws = Draws.of([Sampling()] * rows)
        return (
            params,
            state,
            self.plan.shapes(self.mesh),
            tokens,
            Rows(tables, ints, ints, ints, source),
            jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draws)),
        )

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

    @property
    def _stacked_structs(self) -> Any:
        dtype = self.plan.layout.param_dtype
        return jax.tree.map(
            lambda one: stored_shape(one, dtype),
            self.placement.model.parameters,
            is_leaf=is_parameter,
        )

    @cached_property
    def _forward(self) -> Forward:
        return Forward(
            placement=self.placement,
            plan=self.plan,
            arrangement=None if self.pipeline is None else self.pipeline.arrangement,
            unrolled=self.unrolled,
        )

    @property
    def _stacked_specs(self) -> Any:
        return self.placement.specs(lambda stored: stored.spec)

    def _sharded(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


def _check_token_by_token(model: Model) -> None:
    """Refuses a model to which a token by itself is not what it is among others."""
    found = tokens_joined(model, cached=True)
    if found is not None:
        raise InputError(
            "this model cannot generate token by token: a function joins tokens "
            f"otherwise than by meshpar's attention: {found}",
            key="generation.joined_tokens",
        )


def stored_shape(parameter: Parameter, param_dtype: str) -> jax.ShapeDtypeStruct:
    """Of a parameter at rest."""
    dtype = parameter.dtype
    if jnp.issubdtype(dtype, jnp.floating) and not parameter.in_full:
        dtype = PARAM_DTYPES[param_dtype]
    return jax.ShapeDtypeStruct(parameter.stacked_shape, dtype)
