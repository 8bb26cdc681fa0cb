"""Whether an optimizer run by layer does what it does to layers as parameters.

Layers as parameters of their own are what an optimizer is written for. Its trace on
such a tree, of two layers, is compared with the trace on one layer as it is run for
several: every output must be computed by the same operations of the same inputs. So an
optimizer that counts parameters, or draws other random numbers for each, is found.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import optax

from meshpar.train.optimizer.flow import NotByLayer, Value, run
from meshpar.train.optimizer.formulas import NUM_COPIES, Formulas, of_all_copies
from meshpar.train.optimizer.program import Program
from meshpar.train.optimizer.traced import Slot, Traced, check_owner, traced
from meshpar.train.optimizer.unrolled import TREES, slots_of

_Names = dict[tuple[str, int | None], str]
"""(Path, layer) -> what computes the array; no layer where there is none."""


def refusal(
    optimizer: optax.GradientTransformation,
    params: Any,
    of_layer: Traced,
    stacked: Collection[str],
) -> str | None:
    """Why an optimizer cannot be run by layer; None if it can.

    Args:
        optimizer: The optimizer.
        params: Shapes, one layer's of each stacked parameter.
        of_layer: Its trace on them.
        stacked: Paths of the stacked parameters.
    """
    try:
        found = _names(of_layer, stacked)
    except NotByLayer as reason:
        return str(reason)
    reasons = []
    for unrolled in TREES:
        tree, slots = unrolled(params, stacked), slots_of(params, stacked)
        try:
            wanted = _names(traced(optimizer, tree, slots), ())
        except NotByLayer as reason:
            reasons.append(str(reason))
        except Exception as error:  # whatever the optimizer raises is the reason
            reasons.append(
                "on a tree in which layers are parameters of their own it raises "
                f"{type(error).__name__}: {error}"
            )
        else:
            if found == wanted:
                return None
            reasons.append(_difference(found, wanted))
    return reasons[0]


def _names(trace: Traced, stacked: Collection[str]) -> _Names:
    """Of every output of both functions.

    Raises:
        NotByLayer: It has no meaning for each layer.
    """
    domain = Formulas(frozenset(stacked))
    state = _renamed(trace.state, "state ")
    gradients = _renamed(trace.params, "gradient ")
    params = _renamed(trace.params, "parameter ")
    inputs = (*gradients, *state, *params, Slot("loss", None))
    updates = _renamed(trace.params, "the update of ")
    return {
        **_outputs(trace.init, params, _renamed(trace.state, "the first "), domain),
        **_outputs(trace.update, inputs, (*updates, *state), domain),
    }


def _renamed(slots: tuple[Slot, ...], prefix: str) -> tuple[Slot, ...]:
    return tuple(Slot(prefix + slot.path, slot.owner, slot.copy) for slot in slots)


def _outputs(
    program: Program,
    inputs: tuple[Slot, ...],
    outputs: tuple[Slot, ...],
    domain: Formulas,
) -> _Names:
    values = run(program, [_input(slot, domain) for slot in inputs], domain)
    names: _Names = {}
    for slot, value in zip(outputs, values, strict=True):
        check_owner(slot, value, domain.stacked)
        if slot.owner in domain.stacked:
            copies = enumerate(of_all_copies(value.content))
            names.update(((slot.path, copy), name) for copy, name in copies)
        else:
            names[slot.path, slot.copy] = value.content
    return names


def _input(slot: Slot, domain: Formulas) -> Value:
    if slot.owner in domain.stacked:
        copies = tuple(f"{slot.path} {copy}" for copy in range(NUM_COPIES))
        return Value(slot.owner, copies)
    if slot.copy is None:
        return Value(slot.owner, slot.path)
    return Value(f"{slot.owner} {slot.copy}", f"{slot.path} {slot.copy}")


def _difference(found: _Names, wanted: _Names) -> str:
    """What differs between the names by layer and those of layers as parameters."""
    if found.keys() != wanted.keys():
        return "its state has other arrays where layers are parameters of their own"
    path = next(
        path for (path, copy) in found if found[path, copy] != wanted[path, copy]
    )
    return (
        f"{path} is computed otherwise where layers are parameters of their own: it "
        "counts them, adds up those of one parameter alone, or draws other random "
        "numbers for each"
    )
