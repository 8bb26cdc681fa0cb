"""A model over other parameters, of which the given one's are made as it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from meshpar.model.contract import BlockGroup, Model
from meshpar.model.parameter import Params
from meshpar.model.sums import Sums
from meshpar.model.values import ENDS

FROZEN = "frozen"
"""In the state of a group, and of the ends, what holds the arrays that stay as they
are."""

Rebuild = Callable[[str, Params, Params], Params]
"""(group's name or `ends`, its parameters, what is frozen of it) -> those of the given
model, of one layer."""


def rebuilt(
    model: Model,
    parameters: Params,
    rebuild: Rebuild,
    *,
    frozen: Params | None = None,
) -> Model:
    """The same functions over other parameters, and over state that stays as it is.

    Args:
        model: As given, not arranged for stages.
        parameters: Tree of `Parameter` in place of the model's, groups under their
            names; each is drawn by its own `initial`.
        rebuild: Makes the model's own of them, layer by layer.
        frozen: Tree of `Parameter` that no gradient reaches, laid out by the rules: a
            part of the new model's state, under `frozen`.
    """
    names = [group.name for group in model.groups]
    frozen = frozen or {}
    return replace(
        model,
        parameters=parameters,
        embed=_over(ENDS, model.embed, rebuild),
        groups=tuple(_group(group, rebuild) for group in model.groups),
        head=_over(ENDS, model.head, rebuild),
        logits=None if model.logits is None else _over(ENDS, model.logits, rebuild),
        state=with_frozen(names, model.state, frozen),
        build=_build(model, frozen),
        modules={},
    )


def with_frozen(names: list[str], state: Params, frozen: Params) -> Params:
    """A model's state with what is frozen in it, of any kind of leaf.

    Args:
        names: Of the groups.
        state: Of the model as given.
        frozen: Like its parameters.
    """
    found = dict(state)
    for name in names:
        if name in frozen:
            found[name] = {**state.get(name, {}), FROZEN: frozen[name]}
    ends = {key: value for key, value in frozen.items() if key not in names}
    return {**found, FROZEN: ends} if ends else found


def without_frozen(names: list[str], state: Params) -> tuple[Params, Params]:
    """Undoes `with_frozen`: the model's own state, and what is frozen."""
    own, frozen = _apart(state)
    for name in names:
        if name in own:
            of_group, kept = _apart(own.pop(name))
            frozen = {**frozen, name: kept} if kept else frozen
            own = {**own, name: of_group} if of_group else own
    return own, frozen


def _over(name: str, function: Callable, rebuild: Rebuild) -> Callable[..., Any]:
    """A function of a model, `(params, ..., scope)`, over the other parameters.

    Args:
        name: Of the group whose function it is, or `ends`.
        function: As the model has it.
        rebuild: Makes its parameters.
    """

    def over(params: Params, *given: Any) -> Any:
        *others, scope = given
        own, kept = _apart(scope.state)
        params = rebuild(name, params, kept)
        return function(params, *others, replace(scope, state=own))

    return over


def _group(group: BlockGroup, rebuild: Rebuild) -> BlockGroup:
    def updated(params: Params, state: Params, sums: Sums) -> Params:
        own, kept = _apart(state)
        new = group.updated(rebuild(group.name, params, kept), own, sums)
        return {**new, FROZEN: kept} if kept else new

    return replace(
        group,
        block=_over(group.name, group.block, rebuild),
        enter=None if group.enter is None else _over(ENDS, group.enter, rebuild),
        update_state=None,
        update_from=updated if group.changes_state else None,
    )


def _build(model: Model, frozen: Params) -> dict[str, Any]:
    """What builds a module gives its parameters as state, if they are frozen."""

    def built(name: str, build: Callable) -> Callable[[jax.Array], Any]:
        kept = frozen.get(name) if name != ENDS else frozen

        def of_key(key: jax.Array) -> tuple[Params, Params]:
            params, state = build(key)
            return {}, {**state, FROZEN: params} if kept else state

        return of_key

    return {name: built(name, build) for name, build in model.build.items()}


def _apart(state: Params) -> tuple[Params, Params]:
    own = {key: value for key, value in state.items() if key != FROZEN}
    return own, state.get(FROZEN, {})
