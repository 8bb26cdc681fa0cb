"""Random layouts, and unusual models and batches, for `meshpar fuzz`.

`DRAWS` has the values of each field of `Layout`, one line each. `make_train_step` says
which of them are built, so that a new mesh axis or schedule joins as soon as the
library takes it. `TWISTS` has models and batches with the error that each must give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import MESH_AXES, Layout, Model, RuleError, default_rules, make_train_step
from meshpar.errors import InputError, nearest
from meshpar.layout import EXECUTIONS, STAGE_REMATS
from meshpar.layout.context_method import CONTEXT_METHODS
from meshpar.layout.requirements import layout_errors
from meshpar.parallel.grids.space import splits_tokens
from meshpar.rules.rules import MeshAxes, Rules
from meshpar.schedules import SCHEDULES
from meshpar.testing.batches import Arrays


@dataclass(frozen=True)
class Draw:
    """Values that a field of `Layout` is drawn from.

    Args:
        values: Its values; one that stands there twice is drawn twice as often.
        beside: Mesh axes, one of which must be split for the field to mean anything.
        given: Other fields, and the values that they must have for it.
    """

    values: tuple
    beside: tuple[str, ...] = ()
    given: tuple[tuple[str, object], ...] = ()

    def means_something(self, values: dict[str, Any]) -> bool:
        """Return True if the field has an effect, given the values of other fields."""
        split = [axis for axis in self.beside if values.get(axis, 1) > 1]
        return (bool(split) or not self.beside) and all(
            values.get(name) == value for name, value in self.given
        )


_SIZES = Draw((1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8))  # of an axis that is split: not 1

DRAWS: dict[str, Draw] = {
    **dict.fromkeys(MESH_AXES, _SIZES),
    "microbatches": Draw((1, 1, 2, 3, 4, 5)),
    "schedule": Draw(
        tuple(  # others train otherwise than one device does
            name for name in SCHEDULES if not SCHEDULES[name].updates_each_microbatch
        ),
        beside=("stage",),
    ),
    "execution": Draw(EXECUTIONS, beside=("stage",)),
    "max_pending_w": Draw((0, 1, 2), beside=("stage",)),  # of split backwards
    "chunks": Draw((1, 2), beside=("stage",)),  # of a schedule that has them
    "splits": Draw(((), "cost"), beside=("stage",)),  # or sizes for the layers
    "data_splits": Draw(((),), beside=("data",)),  # or sizes for the microbatches
    "zero": Draw((3, 3, 0, 1, 2), beside=("fsdp", "data")),
    "zero_axes": Draw(
        ((), (), (), ("data",), ("fsdp",), ("data", "fsdp"), ("context",)),
        beside=("fsdp",),
    ),
    "fsdp_gather": Draw(
        ("step", "microbatch", "microbatch"), ("fsdp",), (("microbatches", 2),)
    ),
    "fsdp_prefetch": Draw(("auto", "on", "off"), ("fsdp",)),
    "optimizer_memory": Draw(("device", "device", "host")),
    "sequence_parallel": Draw((False, True), beside=("tensor",)),
    "attention": Draw(tuple(CONTEXT_METHODS), beside=("context",)),
    "remat": Draw(
        (
            *("none", "none", "selective", "full", "dots", *STAGE_REMATS),
            "save:attention_qkv/mlp_hidden",
        )
    ),
    "precision": Draw(("fp32", "fp32", "bf16")),
    "param_dtype": Draw(
        ("fp32", "bf16", "bf16_stochastic"), given=(("precision", "bf16"),)
    ),
    "sync_every": Draw((1,)),  # local steps train otherwise than one device does
}


def built_values(
    model: Model,
    devices: Sequence[jax.Device],
    changes: Mapping[str, MeshAxes] | None = None,
) -> dict[str, tuple]:
    """Return the values of each field that the training step accepts, each tried alone.

    Args:
        model: It is tried with.
        devices: To use.
        changes: Rules that differ from a layout's.
    """
    built: dict[str, tuple] = {}
    for name, draw in DRAWS.items():
        if draw.beside and all(len(set(built[axis])) == 1 for axis in draw.beside):
            built[name] = (getattr(Layout(), name),)
            continue
        takes = {
            value: _is_built(name, value, draw, model, devices, changes or {})
            for value in (dict.fromkeys(draw.values) if name not in MESH_AXES else [2])
        }
        built[name] = tuple(
            value
            for value in draw.values
            if takes.get(value, takes.get(2)) or value == getattr(Layout(), name)
        )
    return built


def _is_built(
    name: str,
    value: Any,
    draw: Draw,
    model: Model,
    devices: Sequence[jax.Device],
    changes: Mapping[str, MeshAxes],
) -> bool:
    needed: dict[str, Any] = {**dict.fromkeys(draw.beside[:1], 2), **dict(draw.given)}
    if name == "zero_axes":
        needed = dict.fromkeys(value or ("fsdp",), 2)
    if name == "chunks" and value != 1:
        needed["schedule"] = next(
            name for name, method in SCHEDULES.items() if method.num_chunks is None
        )
    if name == "max_pending_w" and value:
        needed["schedule"] = next(
            name for name, method in SCHEDULES.items() if method.splits_backward
        )
    if name == "schedule":
        needed["chunks"] = SCHEDULES[value].default_chunks
    if value in STAGE_REMATS:
        needed["stage"] = 2
    layout = Layout(**{name: value}, **needed)
    if layout.num_devices > len(devices):
        return False
    used = devices[: layout.num_devices]
    try:
        rules = default_rules(layout).with_rules(**changes)
        make_train_step(model, optax.sgd(1.0), layout, rules=rules, devices=used)
    except RuleError:  # this model does not suit it, another may
        return True
    except ValueError:
        return False
    return True


def draw_split_axes(
    rng: np.random.Generator, built: dict[str, tuple], num_devices: int
) -> list[str]:
    """Draw the mesh axes to split: at least one, as many as the devices allow."""
    can_split = [axis for axis in MESH_AXES if len(set(built[axis])) > 1]
    most = min(len(can_split), num_devices.bit_length() - 1)
    number = int(rng.integers(1, most + 1)) if most else 0
    return [str(axis) for axis in rng.permutation(can_split)[:number]]


def draw_layout(
    rng: np.random.Generator,
    built: dict[str, tuple],
    num_devices: int,
    split: list[str],
    num_layers: int,
) -> Layout:
    """Draw a layout with the axes `split` split, valid without regard to a model.

    Args:
        rng: What it is drawn from.
        built: Field -> the values that the training step takes.
        num_devices: Devices at most.
        split: Mesh axes to split.
        num_layers: Layers that explicit splits divide.
    """
    values: dict[str, Any] = {}
    for position, axis in enumerate(split):
        num_devices_left = num_devices >> (len(split) - 1 - position)
        sizes = [size for size in built[axis] if 1 < size <= num_devices_left]
        values[axis] = pick(rng, sizes)
        num_devices //= values[axis]
    for name, draw in DRAWS.items():
        if name not in MESH_AXES and draw.means_something(values):
            values[name] = pick(rng, built[name])
    method = SCHEDULES[values.get("schedule", Layout().schedule)]
    if not method.has_chunks(values.setdefault("chunks", 1)):
        values["chunks"] = method.default_chunks
    if not method.splits_backward:
        values.pop("max_pending_w", None)
    if values.get("stage", 1) == 1 and values["remat"] in STAGE_REMATS:
        values["remat"] = "full"
    num_stages = values.get("stage", 1) * values["chunks"]
    if 1 < num_stages <= num_layers and rng.integers(3) == 0:
        values["splits"] = _random_splits(rng, num_layers, num_stages)
    layout = Layout(**values)
    if "execution" in layout_errors(layout):
        layout = replace(layout, execution=Layout().execution)
    if "fsdp_prefetch" in layout_errors(layout):
        layout = replace(layout, fsdp_prefetch=Layout().fsdp_prefetch)
    return _with_uneven_shards(rng, layout)


def _with_uneven_shards(rng: np.random.Generator, layout: Layout) -> Layout:
    """Return every other layout that may have them with random `data_splits`."""
    parts, count = layout.data, layout.microbatches
    if parts == 1 or count == 1 or rng.integers(2):
        return layout
    sizes = _random_splits(rng, parts * count, parts)
    uneven = replace(layout, data_splits=sizes)
    allowed = layout_errors(uneven).keys() <= layout_errors(layout).keys()
    return uneven if allowed else layout


def _random_splits(
    rng: np.random.Generator, total: int, num_parts: int
) -> tuple[int, ...]:
    """Draw sizes of stages or shards, at least 1 each, that add up to `total`."""
    cuts = rng.permutation(np.arange(1, total))[: num_parts - 1]
    bounds = [0, *sorted(int(cut) for cut in cuts), total]
    return tuple(np.diff(bounds).tolist())


def pick(rng: np.random.Generator, values: Sequence) -> Any:
    """Draw one of the values, each as likely."""
    return values[int(rng.integers(len(values)))]


Refusal = Callable[[Model, Layout, Rules], str | None]
"""(model, layout, rules) -> key of the expected error, or None if it must train."""


def _same(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class Twist:
    """A change of a model or of its batches.

    Args:
        model: Model -> the changed one, which one device trains as it is.
        batch: A batch -> the changed one.
        refused: Returns the key of the expected error.
        suits: Whether a model can have it.
    """

    model: Callable[[Model], Model] = _same
    batch: Callable[[Arrays], Arrays] = _same
    refused: Refusal = lambda model, layout, rules: None
    suits: Callable[[Model], bool] = lambda model: True


def twist_named(name: str) -> Twist:
    """Return the twist of a name.

    Raises:
        InputError: There is none.
    """
    if name not in TWISTS:
        raise InputError(
            f"no twist {name!r}; {nearest(name, TWISTS)}", key="testing.unknown_twist"
        )
    return TWISTS[name]


def _with_backward(change: Callable[[jax.Array], jax.Array]) -> Callable:
    """Return a change of a model: a custom backward after `embed`, of its tokens.

    The gradient of one vector of an example, as of a condition, is a sum over tokens,
    so that with `context` no change of it but a linear one could be allowed.
    """

    @jax.custom_vjp
    def function(x: jax.Array) -> jax.Array:
        return x

    function.defvjp(lambda x: (x, None), lambda _, dx: (change(dx),))

    def on(x: jax.Array) -> jax.Array:
        is_changed = jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 2
        return function(x) if is_changed else x

    def changed(model: Model) -> Model:
        embed = model.embed

        def after(params: Any, batch: Any, scope: Any) -> Any:
            return jax.tree.map(on, embed(params, batch, scope))

        return replace(model, embed=after)

    return changed


def _flat(model: Model) -> Model:
    """Return the model with examples and tokens flattened into one dim in its head."""
    head = model.head

    def flattened(params: Any, x: Any, batch: Any, scope: Any) -> Any:
        arrays = {
            name: array.reshape(-1, 1, *array.shape[2:]) if array.ndim > 1 else array
            for name, array in batch.items()
        }
        return head(params, x.reshape(-1, 1, *x.shape[2:]), arrays, scope)

    return replace(model, head=flattened)


def _is_token_wise(model: Model) -> bool:
    """Return True if the stream and all inputs have tokens as dim 1."""
    return all(group.stream is None for group in model.groups) and all(
        one.logical_axes == ("batch", "seq") for one in model.known_inputs.values()
    )


def _joined_tokens(model: Model, layout: Layout, rules: Rules) -> str | None:
    if splits_tokens(model, layout, rules):
        return "model.joins_tokens"
    if layout.stage > 1 and model.per_token:
        return "model.per_token_joins_tokens"
    return None


def _always(key: str) -> Refusal:
    return lambda model, layout, rules: key


TWISTS = {
    "injected": Twist(model=_with_backward(lambda dx: dx + 1e-3)),
    "clipped": Twist(model=_with_backward(lambda dx: jnp.clip(dx, -0.01, 0.01))),
    "joined_examples": Twist(
        model=_with_backward(lambda dx: dx - dx.mean(0)),
        refused=lambda model, layout, rules: (
            "model.joins_examples"
            if layout.batch_shards * layout.microbatches * layout.stage > 1
            else None
        ),
    ),
    "joined_tokens": Twist(
        model=_with_backward(lambda dx: dx - dx.mean(1, keepdims=True)),
        refused=_joined_tokens,
        suits=_is_token_wise,
    ),
    # A trace does not follow the tokens of a split sequence through that reshape.
    "flat": Twist(
        model=_flat,
        refused=lambda *given: "model.joins_tokens" if splits_tokens(*given) else None,
        suits=_is_token_wise,
    ),
    "extra_array": Twist(
        batch=lambda batch: {
            **batch,
            f"{next(iter(batch))}s": np.zeros_like(next(iter(batch.values()))),
        },
        refused=_always("batch.unknown_array"),
        suits=lambda model: model.inputs is not None,
    ),
    "missing_array": Twist(
        batch=lambda batch: dict(list(batch.items())[1:]),
        refused=_always("batch.missing_array"),
    ),
}
"""Twists by name: backwards that are not linear or that join examples
or tokens, a flattened head, and batches with an array too many or too few."""
