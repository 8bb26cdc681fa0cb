"""Build a model under the contract from Flax NNX modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

from flax import nnx

from meshpar.errors import InputError, whole_number
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.inputs import Input
from meshpar.model.nnx_builds import check_untied
from meshpar.model.nnx_functions import Functional
from meshpar.model.parameter import ENDS, Params
from meshpar.model.scope import Scope


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One group of blocks for `from_nnx(groups=...)`.

    Args:
        block: Builds one block from `nnx.Rngs`.
        num_layers: How many there are.
        enter: Name of the method of the ends, called as `(stream, scope) -> stream`,
            that makes this group's stream from that of the group before.
        stream: Tree of the stream's logical axes (`BlockGroup`).
        auxiliary: Name of each auxiliary loss -> its coefficient.
    """

    block: Callable[[nnx.Rngs], nnx.Module]
    num_layers: int
    enter: str | None = None
    stream: Any = None
    auxiliary: Mapping[str, float] = field(default_factory=dict)


def from_nnx(
    *modules: Any,
    ends: Callable[[nnx.Rngs], nnx.Module] | None = None,
    block: Callable[[nnx.Rngs], nnx.Module] | None = None,
    num_layers: int | None = None,
    groups: Mapping[str, Blocks] | None = None,
    group: str = "blocks",
    inputs: Mapping[str, Input] | None = None,
    stream: Any = None,
    per_token: bool = False,
    sequence_inputs: Sequence[str] = (),
    auxiliary: Mapping[str, float] | None = None,
) -> Model:
    """Return a model whose two ends and repeated blocks are Flax NNX modules.

    The ends module has `embed(batch, scope) -> stream`, `head(stream, batch, scope) ->
    (loss_sum, weight_sum)` and, for sampling, `logits(stream, scope)`. A block module
    is called as `block(stream, scope) -> stream`, or `-> (stream, sums)` with auxiliary
    losses. Logical axes are the modules' own sharding metadata (`nnx.with_partitioning`
    or `out_sharding=`), a parameter without any is replicated. The parameter tree of a
    group of blocks stands under its name.

    A module starts as Flax starts it, from `nnx.Rngs(initial_key(seed, group, layer))`.
    Its variables that are no `nnx.Param`, and its arrays, are state: constants, unless
    a block has `update_state(sums)`, which is called once a step with the sums that the
    block returned, over the global batch, and assigns to them; parameters that it reads
    are those before the step. `nnx.BatchNorm` takes the statistics of the global batch.

    Args:
        modules: Not accepted: modules that are built already.
        ends: Builds the module of embedding and head.
        block: Builds one block.
        num_layers: Number of blocks.
        groups: Name -> `Blocks`, in order, instead of `block` and `num_layers`.
        group: Name of the blocks in parameter paths, where there is one group.
        inputs: Name -> `Input` of the arrays of a batch (`Model`).
        stream: Tree of the stream's logical axes (`BlockGroup`).
        per_token: Whether embed and head treat every token by itself (`Model`).
        sequence_inputs: Further arrays of a batch that are (batch, seq, ...) (`Model`).
        auxiliary: Name of each auxiliary loss of the blocks -> its coefficient.

    Raises:
        InputError: No blocks, or ones without parameters; parameters of the ends with
            the name of a group; a module that holds a random key of its own, that two
            builds from one key make differently, or whose parameters are another's.
    """
    if modules:
        given = ", ".join(type(one).__name__ for one in modules)
        raise InputError(
            f"from_nnx is given {given}: a model is of functions that build its parts, "
            "such as from_nnx(ends=lambda rngs: Ends(rngs), block=lambda rngs: "
            "Block(rngs), num_layers=4)",
            key="model.no_builders",
        )
    options = {"stream": stream, "auxiliary": {} if auxiliary is None else auxiliary}
    chosen = _groups(groups, group, block, num_layers, options)
    build_ends = cast(Callable[[nnx.Rngs], nnx.Module], ends)
    end = Functional(build_ends, "ends")  # Which refuses None.
    made = {}
    for name, one in chosen.items():
        called = "block" if groups is None else f"groups[{name!r}].block"
        made[name] = Functional(one.block, called)
    _check_methods(end, chosen, made)
    _check_names(end, made)
    sizes = {name: one.num_layers for name, one in chosen.items()}
    parts = {ENDS: end, **made}
    built = {name: one.built for name, one in parts.items()}
    check_untied({**sizes, ENDS: None}, built)
    state = {name: one.state(sizes[name]) for name, one in made.items()}
    params = {name: one.parameters(sizes[name]) for name, one in made.items()}

    def logits(params: Params, x: Any, scope: Scope) -> Any:
        return end.run(params, scope, "logits", x, scope)

    return Model(
        parameters={**end.parameters(None), **params},
        embed=functools.partial(end.run_stream, "embed"),
        groups=tuple(_group(name, chosen[name], made[name], end) for name in chosen),
        head=end.run_head,
        logits=logits if end.has("logits") else None,
        inputs=inputs,
        per_token=per_token,
        sequence_inputs=tuple(sequence_inputs),
        state={**end.state(None), **{k: tree for k, tree in state.items() if tree}},
        constants=tuple(
            path if name == ENDS else f"{name}.{path}"
            for name, one in parts.items()
            for path in one.constants
        ),
        build={name: one.build for name, one in parts.items()},
        modules={ENDS: build_ends, **{name: one.block for name, one in chosen.items()}},
    )


def _groups(
    groups: Mapping[str, Blocks] | None,
    name: str,
    block: Callable[[nnx.Rngs], nnx.Module] | None,
    num_layers: int | None,
    options: Mapping[str, Any],
) -> dict[str, Blocks]:
    if (groups is None) == (block is None) or (block is None) != (num_layers is None):
        raise InputError(
            "give from_nnx either block= and num_layers=, or groups= with a "
            "meshpar.Blocks for each name",
            key="model.block_or_groups",
        )
    if groups is None and block is not None and num_layers is not None:
        groups = {name: Blocks(block=block, num_layers=num_layers, **options)}
    if not isinstance(groups, Mapping) or not groups:
        raise InputError(
            f"from_nnx(groups={groups!r}): a model has at least 1 group of blocks; "
            "give a dict of name -> meshpar.Blocks",
            key="model.no_dict_of_groups",
        )
    if ENDS in groups:
        raise InputError(
            f"from_nnx: a group of blocks is named {ENDS!r}, as the model's own ends "
            "are; give it another name",
            key="model.group_named_ends",
        )
    for name, one in groups.items():
        if not isinstance(one, Blocks):
            raise InputError(
                f"from_nnx(groups={{{name!r}: {one!r}}}): give a meshpar.Blocks",
                key="model.not_blocks",
            )
        whole_number(f"from_nnx: {name!r} has num_layers", one.num_layers)
        _check_auxiliary(one.auxiliary)
    return dict(groups)


def _check_auxiliary(auxiliary: Any) -> None:
    numbers = isinstance(auxiliary, Mapping) and all(
        isinstance(value, Real) for value in auxiliary.values()
    )
    if not numbers:
        raise InputError(
            f"from_nnx(auxiliary={auxiliary!r}): give a dict of name -> coefficient, "
            "such as {'router_z': 1e-3}",
            key="model.auxiliary_not_coefficients",
        )


def _check_methods(
    end: Functional, chosen: Mapping[str, Blocks], made: Mapping[str, Functional]
) -> None:
    end.check_method("embed", "batch", "scope")
    end.check_method("head", "stream", "batch", "scope")
    for name, one in chosen.items():
        if one.enter is not None:
            end.check_method(one.enter, "stream", "scope")
        made[name].check_method("__call__", "stream", "scope")
        made[name].check_parameters()


def _check_names(end: Functional, groups: Mapping[str, Functional]) -> None:
    paths = {
        f"{name}.{leaf.name}"
        for name, one in groups.items()
        for leaf in one.built.leaves
    }
    of_ends = {leaf.name for leaf in end.built.leaves}
    taken = ({*end.parameters(None), *end.state(None)} & set(groups)) | paths & of_ends
    if taken:
        raise InputError(
            f"{end.what}: its parameters {sorted(taken)[0]!r} have the name of the "
            "blocks; rename them or pass another group=",
            key="model.name_of_blocks_taken",
        )


def _group(name: str, given: Blocks, block: Functional, end: Functional) -> BlockGroup:
    return BlockGroup(
        name=name,
        num_layers=given.num_layers,
        block=block.run_block,
        enter=functools.partial(end.run_stream, given.enter) if given.enter else None,
        stream=given.stream,
        auxiliary=dict(given.auxiliary),
        update_from=block.update_state if block.changes_state else None,
        called=f"{block.what}: __call__",
    )
