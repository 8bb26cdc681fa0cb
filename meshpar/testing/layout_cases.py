"""Cases: a layout, a model and a batch to compare with the single-device program.

Whether a layout suits a model and a batch is asked of the library (`lint`).
"""

from __future__ import annotations

import functools
import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from meshpar import (
    Layout,
    Model,
    Rules,
    absent_mesh,
    default_rules,
    lint,
    make_train_step,
)
from meshpar.checks.sequences import context_errors
from meshpar.errors import InputError, nearest, whole_number
from meshpar.machine.emulate import DEFAULT_DEVICES
from meshpar.model.inputs import input_shapes
from meshpar.parallel.grids.space import has_pairs, has_space, space_errors
from meshpar.parallel.parameter_specs import parameter_specs
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.rules.rules import MeshAxes
from meshpar.rules.spatial import SPATIAL
from meshpar.schedules import SCHEDULES
from meshpar.testing.draws import (
    Twist,
    built_values,
    draw_layout,
    draw_split_axes,
    pick,
)
from meshpar.testing.masks import MASKS

SEQS = (8, 12, 16)
LARGEST_BATCH = 16  # examples
_RESUMING = 4
_TWISTED = 3
_DRAWS = 4  # of a turn, one after another
_TRIES = 20  # sizes for one choice of mesh axes to split
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
        mask: Which tokens count (`masks.MASKS`).
        seed: Of initial values, dropout and the batch.
        resume_as: What the run goes on under after its first step, from a checkpoint.

    Raises:
        InputError: There is no such mask.
    """

    layout: Layout
    model: str = ""
    global_batch: int
    seq: int
    mask: str = "full"
    seed: int = 0
    resume_as: Layout | None = None

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise InputError(
                f"no mask {self.mask!r}; {nearest(self.mask, MASKS)}",
                key="testing.unknown_mask",
            )

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the line that `str` printed.

        Example:
            >>> line = "--layout data=2 --global-batch 8 --seq 4 --mask full --seed 0"
            >>> str(Case.parse(line)) == line
            True

        Raises:
            InputError: The text is no such line.
        """
        words = shlex.split(text)
        options = dict(zip(words[::2], words[1::2], strict=False))
        resume_as = options.pop("--resume-as", None)
        try:
            return cls(
                layout=Layout.parse(options.pop("--layout")),
                global_batch=int(options.pop("--global-batch")),
                seq=int(options.pop("--seq")),
                mask=options.pop("--mask"),
                seed=int(options.pop("--seed")),
                resume_as=None if resume_as is None else Layout.parse(resume_as),
                model=shlex.join(word for pair in options.items() for word in pair),
            )
        except KeyError as error:
            raise InputError(
                f"case {text!r} has no {error}; give the line as a report prints it",
                key="testing.incomplete_case",
            ) from error

    def __str__(self) -> str:
        resume = f" --resume-as {self.resume_as}" if self.resume_as else ""
        return (
            f"{self.model} --layout {self.layout} --global-batch {self.global_batch} "
            f"--seq {self.seq} --mask {self.mask} --seed {self.seed}{resume}"
        ).strip()

    @property
    def command(self) -> str:
        """Shell command, or Python call, that repeats the comparison."""
        if not self.model:
            return f'check_layouts(model, ..., layouts=["{self}"])'
        layouts = [one for one in (self.layout, self.resume_as) if one]
        devices = max(one.num_devices for one in layouts)
        more = f" --devices {devices}" if devices > DEFAULT_DEVICES else ""
        return f"meshpar fuzz {self}{more}"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Models, batches and options that cases are drawn from.

    Args:
        models: Texts that `build` makes models of.
        build: Text -> model; remembers what it built.
        turns: Families of these models, as they take turns; one that is there twice
            has two of them. Each model is one where there are none.
        changes: Text -> rules of the model's own, beside those of a layout.
        global_batch, seq: Sizes of the batch; None to draw them.
        masks: Names in `masks.MASKS`.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
        check: Refuses a layout and its rules that do not suit the caller's batch.
        twist: Text -> what makes its model or batch unusual, or None.
        twists: Names that are drawn; the text of a model is given `--twist NAME` more.
    """

    models: tuple[str, ...]
    build: Callable[[str], Model]
    turns: tuple[tuple[str, ...], ...] = ()
    changes: Callable[[str], Mapping[str, MeshAxes]] = lambda _: {}
    global_batch: int | None = None
    seq: int | None = None
    masks: tuple[str, ...] = tuple(MASKS)
    rules: Rules | None = None
    check: Callable[[Layout, Rules], None] = lambda layout, rules: None
    twist: Callable[[str], Twist | None] = lambda text: None
    twists: tuple[str, ...] = ()

    def case_rules(self, case: Case) -> Rules:
        """Return the rules of a case.

        Raises:
            RuleError: The model's own are none.
        """
        rules = self.rules or default_rules(case.layout)
        return rules.with_rules(**self.changes(case.model))

    def refused(self, case: Case) -> str | None:
        """Return the key of the error that a case must give; None if it must train."""
        twist = self.twist(case.model)
        if twist is None:
            return None
        return twist.refused(self.build(case.model), case.layout, self.case_rules(case))


def draw_cases(
    num: int, seed: int, choices: Choices, devices: Sequence[jax.Device]
) -> list[Case]:
    """Draw `num` different valid cases; deterministic.

    Families take turns, and models within one: the first N cases are of all N families,
    but for one of which `_DRAWS` cases in a row are refused, or are there already.
    Every `_RESUMING`-th goes on under another layout after its first step, and every
    `_TWISTED`-th of the others has a twist.

    Raises:
        InputError: So many cannot be found; the last refusal is in the message.
    """
    whole_number("num", num)
    rng, of_others, of_twists = (
        np.random.default_rng(of) for of in (seed, [seed, 1], [seed, 2])
    )
    first = choices.models[0]
    built = built_values(choices.build(first), devices, choices.changes(first))
    cases: dict[Case, None] = {}
    turns = _turns(rng, choices)
    models = {family: itertools.cycle(family) for family in turns}
    for family in itertools.islice(itertools.cycle(turns), 5 * num):
        for model in itertools.islice(models[family], _DRAWS):
            case, refused = _draw_case(rng, model, built, len(devices), choices, cases)
            if refused is None and len(cases) % _RESUMING == _RESUMING - 1:
                case = _resuming(case, of_others, built, len(devices), choices)
            elif refused is None and choices.twists:
                case = _twisted(case, len(cases), of_twists, choices)
            if refused is None and case not in cases:
                cases[case] = None
                break
        if len(cases) == num:
            return list(cases)
    raise InputError(
        f"only {len(cases)} different layouts of {num} could be drawn; the last one "
        f"was {case} and "
        + (f"was refused: {refused}" if refused else "is no new one"),
        key="testing.too_few_layouts",
    )


def _turns(rng: np.random.Generator, choices: Choices) -> list[tuple[str, ...]]:
    """Return each family once, in random order, then those with more turns."""
    turns = list(choices.turns or ((model,) for model in choices.models))
    families = list(dict.fromkeys(turns))
    for family in families:
        turns.remove(family)
    return [*(families[at] for at in rng.permutation(len(families))), *turns]


def refusal(case: Case, choices: Choices) -> InputError | None:
    """Return the error with which the library refuses a case; None if it takes it."""
    if case.resume_as is not None:
        whole = replace(case, resume_as=None)
        later = replace(whole, layout=case.resume_as)
        return refusal(whole, choices) or refusal(later, choices)
    model = choices.build(case.model)
    try:
        rules = choices.case_rules(case)
        choices.check(case.layout, rules)
        # The lint, without a trace.
        stored = arranged_for(model, case.layout)
        for path, parameter in stored.flat_parameters().items():
            parameter_specs(path, parameter, case.layout, rules)
        for refused in space_errors(model, case.layout, rules):
            return refused
        for refused in context_errors(model, case.layout, rules, case.seq):
            return refused
        report = lint(
            model,
            case.layout,
            rules,
            global_batch=case.global_batch,
            seq=case.seq,
        )
    except InputError as error:
        return error
    except ValueError as error:
        return InputError(str(error), key="testing.refused_layout")
    for finding in report.findings:
        if finding.kind not in COSTS_ONLY:
            return InputError(finding.message, key=finding.key)
    return _short_part(model, case, choices, rules)


def _short_part(
    model: Model, case: Case, choices: Choices, rules: Rules
) -> InputError | None:
    """Return the error of a step's trace, which alone finds too small parts."""
    sizes: dict[str, Any] = {**case.layout.mesh_shape}
    split = [
        dim
        for dim in SPATIAL
        if dim in rules.table and any(sizes[axis] > 1 for axis in rules.mesh_axes(dim))
    ]
    if not has_space(model) or case.layout.batch_shards == 1 or len(split) < 2:
        return None
    return _refused_trace(choices.build, case.model, Layout(**sizes), rules)


@functools.cache
def _refused_trace(
    build: Callable[[str], Model], text: str, layout: Layout, rules: Rules
) -> InputError | None:
    """Return the error of tracing a step; cached, as a trace takes seconds."""
    model, mesh = build(text), absent_mesh(layout)
    step = make_train_step(model, optax.sgd(1e-3), layout, rules=rules, mesh=mesh)
    batch = input_shapes(model.inputs or {}, {"batch": layout.batch_shards})
    try:
        step.audit_subject(batch).flat()
    except InputError as error:  # Kept without its frames.
        return InputError(str(error), key=error.key)
    return None


def _draw_case(
    rng: np.random.Generator,
    model: str,
    built: dict[str, tuple],
    num_devices: int,
    choices: Choices,
    cases: Iterable[Case],
) -> tuple[Case, InputError | None]:
    """Draw a case of a model; return it with its refusal, if any.

    Which mesh axes to split and which schedule to run are chosen once, so that those
    which rarely suit the model are not rare for it.
    """
    num_layers = sum(group.num_layers for group in choices.build(model).groups)
    built = _suited(built, choices.build(model))
    if choices.twist(model) is not None:
        built = {**built, "precision": ("fp32",), "param_dtype": ("fp32",)}
    split = draw_split_axes(rng, built, num_devices)
    schedule = _least_drawn(rng, built["schedule"], num_layers, cases)
    built = {**built, "schedule": (schedule,)}
    for _ in range(_TRIES):
        layout = draw_layout(rng, built, num_devices, split, num_layers)
        shards = layout.batch_shards * layout.microbatches
        multiples = range(1, max(1, min(3, LARGEST_BATCH // shards)) + 1)
        case = Case(
            layout=layout,
            model=model,
            global_batch=choices.global_batch or shards * pick(rng, multiples),
            seq=choices.seq or pick(rng, SEQS),
            mask=pick(rng, choices.masks),
            seed=int(rng.integers(1000)),
        )
        refused = refusal(case, choices)
        if refused is None:
            break
    return case, refused


def _least_drawn(
    rng: np.random.Generator,
    schedules: Sequence[str],
    num_layers: int,
    cases: Iterable[Case],
) -> str:
    """Return the schedule of the fewest cases, of those with a layer for each stage."""
    drawn = Counter(case.layout.schedule for case in cases if case.layout.stage > 1)
    fitting = [
        name
        for name in schedules
        if 2 * SCHEDULES[name].default_chunks <= max(2, num_layers)
    ]
    return min(map(str, rng.permutation(fitting)), key=lambda name: drawn[name])


def _resuming(
    case: Case,
    rng: np.random.Generator,
    built: dict[str, tuple],
    num_devices: int,
    choices: Choices,
) -> Case:
    """Return the case resuming under another layout, if a few draws find one."""
    model = choices.build(case.model)
    num_layers = sum(group.num_layers for group in model.groups)
    built = _suited(built, model)
    same = {name: getattr(case.layout, name) for name in ("precision", "param_dtype")}
    for _ in range(_TRIES):
        split = draw_split_axes(rng, built, num_devices)
        layout = draw_layout(rng, built, num_devices, split, num_layers)
        other = replace(case, resume_as=replace(layout, **same))
        if refusal(other, choices) is None:
            return other
    return case


def _twisted(
    case: Case, number: int, rng: np.random.Generator, choices: Choices
) -> Case:
    """Return every third fp32 case with a random suitable twist.

    bf16 is left out: a nonlinear backward has no known error bound there.
    """
    if number % _TWISTED != _TWISTED - 1 or case.layout.precision != "fp32":
        return case
    model = choices.build(case.model)
    for at in rng.permutation(len(choices.twists)):
        text = f"{case.model} --twist {choices.twists[at]}".strip()
        twist = choices.twist(text)
        if twist is not None and twist.suits(model):
            return replace(case, model=text)
    return case


def _suited(built: dict[str, tuple], model: Model) -> dict[str, tuple]:
    """Return the values of each field that apply to a model and have a bound.

    bf16 rounds the scores of experts, so that tokens near a tie go to others than in
    fp32, as far away as experts differ. Of a volume, each value of a kernel's gradient
    is a sum over all voxels, whose terms cancel more than their roundings do; of a
    model of looked up rows, few examples make a gradient, of which a rounding turns
    whole ReLUs off; so it does of pairs, whose norms divide sums that cancel. On one
    device gradients of small ones were up to 0.49, 0.12 and 0.10 off, where the bounds
    are 0.05 to 0.09.
    """
    looked_up = any(one.has_gradient for one in model.known_inputs.values())
    if looked_up or has_space(model) or has_pairs(model):
        built = {**built, "precision": ("fp32",), "param_dtype": ("fp32",)}
    parameters = model.flat_parameters().values()
    if any("experts" in one.logical_axes for one in parameters):
        return {**built, "precision": ("fp32",), "param_dtype": ("fp32",)}
    return {**built, "expert": (1,)}
