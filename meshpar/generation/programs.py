"""The compiled programs of generation: a model laid out, its cache, one new token each.

One function makes both: prefill takes a chunk of a few examples' prompts, decode one
token of every example that may run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.errors import InputError, whole_number
from meshpar.generation.cache_plan import CachePlan, cached_arrays, check_has_cache
from meshpar.generation.forward import Forward
from meshpar.generation.layer_by_layer import (
    layer_by_layer,
    layer_specs,
    layers_apart,
)
from meshpar.generation.sampling import Draws, Sampling, drawn
from meshpar.layout import MESH_AXES, Layout
from meshpar.mesh import absent_mesh, make_mesh, platform_of
from meshpar.model.contract import Model, check_model
from meshpar.model.parameter import Parameter, is_parameter
from meshpar.model.values import initial_values
from meshpar.parallel.paged_cache import Pools, Rows
from meshpar.parallel.pipeline.program import Pipeline, pipeline_of
from meshpar.parallel.placement import DTYPES, PARAM_DTYPES, Placement
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.rules.sharding import path_name
from meshpar.train.given_values import placed_values

_WHOLE = {
    "heads": "heads do not divide over {}: attention is whole on each device",
    "kv_heads": "key/value heads do not divide over {}: their weights are whole on "
    "each device, which keeps copies of the heads of its own queries",
}

PLAIN = Layout()
"""One device."""

_KEPT = (*MESH_AXES, "splits", "zero", "zero_axes", "precision", "param_dtype")


def generation_layout(layout: Layout | str) -> Layout:
    """The part of a layout that generation knows; what is for training alone is left.

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
            raise InputError("the model has no logits function; give Model logits=")
        layout = Layout.of(layout)
        if mesh is None:
            mesh = make_mesh(layout, devices)
        layout = generation_layout(layout.resolve(mesh.size))
        rules = default_rules(layout) if rules is None else rules
        check_rules(rules)
        rules, notes = _with_whole_heads(model, layout, rules)
        pipeline = pipeline_of(model, layout) if layout.stage > 1 else None
        arranged = model if pipeline is None else pipeline.model
        placement = Placement(
            model=arranged,
            layout=layout,
            rules=rules,
            mesh=mesh,
            platform=platform_of(mesh),
        )
        return cls(
            placement=placement,
            plan=_plan(
                placement, pipeline, slots, max_seq, page_size, num_pages, chunk
            ),
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
        return self._sharded(self.placement.specs(lambda stored: stored.spec))

    @cached_property
    def parameter_shardings(self) -> Any:
        """The sharding of every parameter at rest, as `at_rest` has them."""
        specs = self.placement.specs(lambda stored: stored.spec)
        if not self.unrolled:
            return self._sharded(specs)
        model = self.placement.model
        ranks = self.plan.layout.stage
        return self._sharded(layer_specs(model, specs, self._stacked_structs, ranks))

    @cached_property
    def at_rest(self) -> Any:
        """Stacked parameters -> what the programs take; the stacks are given up."""
        if not self.unrolled:
            return lambda params: params
        model, ranks = self.placement.model, self.plan.layout.stage

        groups = [group.name for group in model.groups]
        shardings = self.parameter_shardings

        def cut(params: Any) -> Any:
            return {
                name: jax.tree.map(
                    lambda stack, own: _apart(stack, own, ranks),
                    tree,
                    shardings[name],
                    is_leaf=lambda node: isinstance(node, tuple),
                )
                if name in groups
                else tree
                for name, tree in params.items()
            }

        return cut

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
            "decode": (self.plan.slots, 1),
            "prefill": (self.rows_of_prefill, self.plan.chunk),
        }
        if arguments[-1] not in shapes:
            raise InputError(
                f"audit(programs, {arguments[-1]!r}): give one of {', '.join(shapes)}"
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

    def _argument_shapes(self, rows: int, num_tokens: int) -> tuple[Any, ...]:
        model, params = self.placement.model, self._stacked_structs
        if self.unrolled:
            ranks = self.plan.layout.stage
            params = jax.eval_shape(lambda x: layer_by_layer(model, x, ranks), params)
        state = jax.tree.map(lambda one: one.struct, model.state, is_leaf=is_parameter)
        ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
        tables = jax.ShapeDtypeStruct((rows, self.plan.table_pages), jnp.int32)
        tokens = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
        draws = Draws.of([Sampling()] * rows)
        return (
            params,
            state,
            self.plan.shapes(self.mesh),
            tokens,
            Rows(tables, ints, ints, ints),
            jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draws)),
        )

    @cached_property
    def _advances(self) -> dict[tuple[bool, bool, bool], Any]:
        either = False, True
        return {
            (random, truncated, logits): self._jitted(
                partial(self._advanced, random, truncated, logits), 3 + logits
            )
            for random, truncated, logits in itertools.product(either, either, either)
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

    def _jitted(self, function: Any, num_results: int) -> Any:
        shapes = self.plan.shapes(self.mesh)
        pools = jax.tree.map(lambda one: one.sharding, shapes)
        here = NamedSharding(self.mesh, PartitionSpec())
        of_model = self.parameter_shardings, self.state_shardings
        return jax.jit(
            function,
            in_shardings=(*of_model, pools, here, here, here),
            out_shardings=(*(here,) * (num_results - 1), pools),
            donate_argnums=2,
        )

    def _sharded(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            specs,
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )


def _apart(
    stack: jax.Array, shardings: tuple[NamedSharding, ...], num_ranks: int
) -> tuple[jax.Array, ...]:
    """The layers of one stack, which is gone then: two are never whole at once."""
    found = jax.block_until_ready(
        jax.jit(lambda x: layers_apart(x, num_ranks), out_shardings=tuple(shardings))(
            stack
        )
    )
    stack.delete()
    return found


def stored_shape(parameter: Parameter, param_dtype: str) -> jax.ShapeDtypeStruct:
    """Of a parameter at rest."""
    dtype = parameter.dtype
    if jnp.issubdtype(dtype, jnp.floating) and not parameter.in_full:
        dtype = PARAM_DTYPES[param_dtype]
    return jax.ShapeDtypeStruct(parameter.stacked_shape, dtype)


def _plan(
    placement: Placement,
    pipeline: Pipeline | None,
    slots: int,
    max_seq: int,
    page_size: int,
    num_pages: int | None,
    chunk: int,
) -> CachePlan:
    layout, rules = placement.layout, placement.rules
    sizes = {"slots": slots, "max_seq": max_seq, "page_size": page_size, "chunk": chunk}
    for name, value in sizes.items():
        whole_number(name, value)
    if slots % layout.batch_shards:
        raise InputError(
            f"slots={slots} examples do not divide over the {layout.batch_shards} "
            f"devices that share the batch of layout {str(layout)!r}; give a multiple"
        )
    dtype = DTYPES[layout.precision]
    groups = cached_arrays(placement.model, layout, rules, max_seq, dtype)
    check_has_cache(groups)
    if pipeline is None:
        places = [group.num_layers for group in placement.model.groups]
    else:
        places = [table.size for table in pipeline.arrangement.layers]
    plan = CachePlan(
        groups=groups,
        places=tuple(places),
        slots=slots,
        max_seq=max_seq,
        page_size=page_size,
        num_pages=0,
        chunk=min(chunk, max_seq),
        layout=layout,
        rules=rules,
    )
    enough = plan.table_pages * slots // layout.batch_shards
    pages = enough if num_pages is None else whole_number("num_pages", num_pages)
    return replace(plan, num_pages=pages)


def _with_whole_heads(
    model: Model, layout: Layout, rules: Rules
) -> tuple[Rules, tuple[str, ...]]:
    """Rules under which heads that do not divide are whole on each device; and notes.

    A training step refuses them; whoever generates has the model that there is.
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
