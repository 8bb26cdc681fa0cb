"""Layouts to test a model under: the table that random ones are drawn from.

What a field of `Layout` may be stands in `DRAWS`, one line each; which of its values
are built, and whether a whole layout suits a model and a batch, is asked of the library
(`make_train_step`, `lint`), never decided here. So a new mesh axis or schedule joins as
soon as the library takes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from meshpar import MESH_AXES, Layout, Model, RuleError, Rules, lint, make_train_step
from meshpar.testing.batches import MASKS


@dataclass(frozen=True)
class Draw:
    """What a field of `Layout` is drawn from.

    Args:
        values: Its values; one that stands there twice is drawn twice as often.
        beside: The mesh axis that must be split for the field to mean anything.
    """

    values: tuple
    beside: str | None = None


_SIZES = Draw((1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8))

DRAWS: dict[str, Draw] = {
    **dict.fromkeys(MESH_AXES, _SIZES),
    "microbatches": Draw((1, 2, 3, 4)),
    "schedule": Draw(
        (
            *("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zero_bubble_h1"),
            *("zero_bubble_h2", "zero_bubble_v", "v_half", "v_min", "dualpipe_v"),
        ),
        beside="stage",
    ),
    "chunks": Draw((1, 2), beside="stage"),
    "splits": Draw(((),), beside="stage"),
    "execution": Draw(("uniform", "divergent"), beside="stage"),
    "zero": Draw((3, 3, 0, 1, 2), beside="fsdp"),
    "sequence_parallel": Draw((False, True), beside="tensor"),
    "attention": Draw(("ring", "allgather", "ulysses"), beside="context"),
    "remat": Draw(("none", "none", "selective", "full", "dots")),
    "precision": Draw(("fp32", "fp32", "bf16")),
}

MODELS = tuple(
    f"--model layers={sizes}"
    for sizes in (
        "2,gated=true,hidden=32,heads=4,kv_heads=2,ffn=64,vocab=64,tied=true",
        "1,gated=true,hidden=32,heads=8,kv_heads=8,ffn=64,vocab=64,tied=false",
        "3,gated=true,hidden=48,heads=6,kv_heads=3,ffn=96,vocab=72,qk_norm=true",
        "2,gated=true,hidden=40,heads=5,kv_heads=5,ffn=60,vocab=70,qkv_bias=true",
        "2,hidden=32,heads=4,vocab=64,max_seq=16,dropout=0.2",
    )
)
"""Small models in the command line's words, for `models.presets:build`: a tied and
untied head, grouped heads, biases, norms, dropout, and sizes that 3 or 5 divides."""

SEQS = (8, 12, 16)
LARGEST_BATCH = 16  # examples
DEFAULT_DEVICES = 8  # of `meshpar fuzz`
COSTS_ONLY = ("dead", "idle", "replicated")
"""Findings of the lint that cost time or memory and change no number."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison with the single-device program: all that it depends on.

    Args:
        layout: The layout, every mesh axis with its size.
        model: Options of the command line that build the model; empty where the model
            is an object of the caller's.
        global_batch: Examples in a step.
        seq: Tokens of an example.
        mask: Which tokens count (`batches.MASKS`).
        seed: Of initial values, dropout and the batch.
    """

    layout: Layout
    model: str = ""
    global_batch: int
    seq: int
    mask: str = "full"
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `str` printed.

        Example:
            >>> line = "--layout data=2 --global-batch 8 --seq 4 --mask full --seed 0"
            >>> str(Case.parse(line)) == line
            True

        Raises:
            ValueError: The text is no such line.
        """
        words = shlex.split(text)
        options = dict(zip(words[::2], words[1::2], strict=False))
        try:
            return cls(
                layout=Layout.parse(options.pop("--layout")),
                global_batch=int(options.pop("--global-batch")),
                seq=int(options.pop("--seq")),
                mask=options.pop("--mask"),
                seed=int(options.pop("--seed")),
                model=shlex.join(word for pair in options.items() for word in pair),
            )
        except KeyError as error:
            raise ValueError(
                f"case {text!r} has no {error}; give the line as a report prints it"
            ) from error

    def __str__(self) -> str:
        return (
            f"{self.model} --layout {self.layout} --global-batch {self.global_batch} "
            f"--seq {self.seq} --mask {self.mask} --seed {self.seed}"
        ).strip()

    @property
    def command(self) -> str:
        """What repeats the comparison: a shell command, or a call for an object."""
        if not self.model:
            return f'check_layouts(model, layouts=["{self}"])'
        devices = self.layout.num_devices
        more = f" --devices {devices}" if devices > DEFAULT_DEVICES else ""
        return f"meshpar fuzz {self}{more}"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What cases are drawn from beside layouts.

    Args:
        models: Texts that `build` makes models of.
        build: Text -> model; remembers what it built.
        global_batch, seq: Sizes of the batch; None to draw them.
        masks: Names in `batches.MASKS`.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
    """

    models: tuple[str, ...]
    build: Callable[[str], Model]
    global_batch: int | None = None
    seq: int | None = None
    masks: tuple[str, ...] = tuple(MASKS)
    rules: Rules | None = None


def draw_cases(
    num: int, seed: int, choices: Choices, devices: Sequence[jax.Device]
) -> list[Case]:
    """`num` different valid cases, a function of the arguments alone.

    Raises:
        ValueError: So many cannot be found; the last refusal is in the message.
    """
    rng = np.random.default_rng(seed)
    built = built_values(choices.build(choices.models[0]), devices)
    cases: dict[Case, None] = {}
    reason = "all that can be drawn are drawn"
    for _ in range(100 * num):
        if len(cases) == num:
            break
        case = _draw_case(rng, built, len(devices), choices)
        refused = refusal(case, choices)
        if refused is None:
            cases[case] = None
        reason = refused or reason
    else:
        raise ValueError(
            f"only {len(cases)} of {num} layouts could be drawn; the last one was "
            f"refused: {reason}"
        )
    return list(cases)


def refusal(case: Case, choices: Choices) -> str | None:
    """Why the library does not take a case; None if it does."""
    try:
        report = lint(
            choices.build(case.model),
            case.layout,
            choices.rules,
            global_batch=case.global_batch,
            seq=case.seq,
        )
    except ValueError as error:
        return str(error)
    errors = (finding for finding in report.findings if finding.kind not in COSTS_ONLY)
    return next((finding.message for finding in errors), None)


def built_values(model: Model, devices: Sequence[jax.Device]) -> dict[str, tuple]:
    """The values of each field that the training step takes, each tried by itself."""
    built: dict[str, tuple] = {}
    for name, draw in DRAWS.items():
        if draw.beside is not None and len(set(built[draw.beside])) == 1:
            built[name] = (getattr(Layout(), name),)
            continue
        takes = {
            value: _is_built(name, value, draw.beside, model, devices)
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
    value: object,
    beside: str | None,
    model: Model,
    devices: Sequence[jax.Device],
) -> bool:
    layout = Layout(**{name: value}, **({beside: 2} if beside else {}))
    if layout.num_devices > len(devices):
        return False
    used = devices[: layout.num_devices]
    try:
        make_train_step(model, optax.sgd(1.0), layout, devices=used)
    except RuleError:  # this model does not suit it, another may
        return True
    except ValueError:
        return False
    return True


def _draw_case(
    rng: np.random.Generator,
    built: dict[str, tuple],
    num_devices: int,
    choices: Choices,
) -> Case:
    layout = _draw_layout(rng, built, num_devices)
    shards = layout.batch_shards * layout.microbatches
    multiples = range(1, max(1, min(3, LARGEST_BATCH // shards)) + 1)
    return Case(
        layout=layout,
        model=_pick(rng, choices.models),
        global_batch=choices.global_batch or shards * _pick(rng, multiples),
        seq=choices.seq or _pick(rng, SEQS),
        mask=_pick(rng, choices.masks),
        seed=int(rng.integers(1000)),
    )


def _draw_layout(
    rng: np.random.Generator, built: dict[str, tuple], num_devices: int
) -> Layout:
    values: dict = {}
    for axis in rng.permutation(MESH_AXES):
        sizes = [size for size in built[axis] if size <= num_devices]
        values[str(axis)] = _pick(rng, sizes)
        num_devices //= values[str(axis)]
    for name, draw in DRAWS.items():
        if name not in values and (draw.beside is None or values[draw.beside] > 1):
            values[name] = _pick(rng, built[name])
    return Layout(**values)


def _pick(rng: np.random.Generator, values: Sequence) -> Any:
    return values[int(rng.integers(len(values)))]
