"""Compare random layouts with the single-device program."""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import math
import shlex
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshpar.cli.lint import rule_pairs
from meshpar.cli.options import add_counts, add_model_arguments, chosen_model
from meshpar.cli.parsing import (
    MODEL_FROM,
    OneLineParser,
    not_negative,
    option_words,
    positive,
)
from meshpar.errors import InputError
from meshpar.machine.emulate import DEFAULT_DEVICES, emulate
from meshpar.testing.masks import MASKS

if TYPE_CHECKING:
    import jax

    from meshpar.model.contract import Model
    from meshpar.testing.comparison import Report, Result
    from meshpar.testing.draws import Twist
    from meshpar.testing.layout_cases import Case, Choices


EXAMPLE = "meshpar fuzz --preset tiny --num 1"
STATUSES = "0 all layouts agree, 1 one differs, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    _add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--num", type=positive, default=8, metavar="N", help="number of layouts to draw"
    )
    add("--seed", type=int, default=0, metavar="S", help="seed of everything drawn")
    add(
        "--layout",
        action="append",
        metavar="LINE",
        help="check this layout instead of random ones; may be repeated",
    )
    add(
        "--resume-as",
        metavar="LINE",
        help="with --layout: resume on this layout after one step, from a checkpoint",
    )
    add_counts(
        parser,
        {
            "--global-batch": "sequences per step (default: drawn)",
            "--seq": "tokens per sequence (default: drawn)",
        },
    )
    add(
        "--mask",
        choices=MASKS,
        help="mask of the tokens (default: drawn, or full with --layout)",
    )
    add(
        "--devices",
        type=not_negative,
        default=DEFAULT_DEVICES,
        metavar="N",
        help="virtual CPU devices; 0: real ones (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--with-rules",
        metavar="RULES",
        help="rules to change, such as depth=context,height=tensor or mlp=none "
        "(default: the layout's rules)",
    )
    parser.add_argument(
        "--twist",
        metavar="NAME",
        help="unusual backward, head or batch (default: drawn for some cases)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each layout; return 1 if one differs from one device."""
    import jax

    from meshpar.testing.equivalence import run_cases

    start = time.perf_counter()
    if not 0 <= args.seed < 2**32:
        raise InputError(
            f"--seed {args.seed}: must be at least 0 and below {2**32}",
            key="value.seed_out_of_range",
        )
    if args.devices:
        emulate(args.devices)
    choices, devices = _choices(args), jax.devices()
    cases = _cases(args, choices, devices)
    log = sys.stderr if args.json else sys.stdout
    number = itertools.count(1)

    def announce(case: Case) -> None:
        print(f"[{next(number)}/{len(cases)}] {case.command}", file=log, flush=True)

    def tell(result: Result) -> None:
        print(f"    {result.summary}", file=log, flush=True)

    report = run_cases(cases, choices, devices, on_case=announce, on_result=tell)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps(_as_json(report, args.seed, seconds), allow_nan=False))
    else:
        _print_end(report, seconds)
    return 0 if report.ok else 1


def _cases(
    args: argparse.Namespace, choices: Choices, devices: list[jax.Device]
) -> list[Case]:
    from meshpar.testing.equivalence import make_case
    from meshpar.testing.layout_cases import draw_cases

    if not args.layout:
        if args.resume_as:
            raise InputError(
                "--resume-as goes on from a --layout: give both, or none",
                key="command.resume_without_layout",
            )
        return draw_cases(args.num, args.seed, choices, devices)
    mask, seed = args.mask or "full", args.seed
    return [
        make_case(
            line, choices, devices, mask=mask, seed=seed, resume_as=args.resume_as
        )
        for line in args.layout
    ]


def _choices(args: argparse.Namespace) -> Choices:
    from meshpar.testing.draws import TWISTS
    from meshpar.testing.layout_cases import Choices

    turns = _turns(args)
    return Choices(
        models=tuple(dict.fromkeys(itertools.chain(*turns))),
        turns=turns,
        build=_build,
        changes=_rule_changes,
        twist=_twist,
        twists=() if args.twist else tuple(TWISTS),
        global_batch=args.global_batch,
        seq=args.seq,
        masks=tuple(MASKS) if args.mask is None else (args.mask,),
    )


def _turns(args: argparse.Namespace) -> tuple[tuple[str, ...], ...]:
    """Return the given options of a model; without any, those of all families."""
    words = option_words({"--preset": args.preset, "--model": args.model})
    if args.model_from != MODEL_FROM:
        words = ["--model-from", args.model_from, *words]
    own = {"--with-rules": args.with_rules, "--twist": args.twist}
    rules = shlex.join(option_words(own))
    turns = ((shlex.join(words),),) if words else fuzzed_turns()
    if args.twist is not None:
        turns = _suited_turns(turns, args.twist)
    return tuple(
        tuple(f"{text} {rules}".strip() for text in family) for family in turns
    )


def _suited_turns(
    turns: tuple[tuple[str, ...], ...], name: str
) -> tuple[tuple[str, ...], ...]:
    """Leave out the models that a twist does not suit.

    Raises:
        InputError: It suits none, or there is no such twist.
    """
    from meshpar.testing.draws import twist_named

    twist = twist_named(name)
    kept = [tuple(one for one in turn if twist.suits(_build(one))) for turn in turns]
    if not any(kept):
        raise InputError(
            f"twist {name!r} does not suit this model (joined_tokens and flat need "
            "inputs of (batch, seq) alone); name another --preset or --twist",
            key="testing.unsuited_twist",
        )
    return tuple(filter(None, kept))


def fuzzed_turns() -> tuple[tuple[str, ...], ...]:
    """Return the presets' families of models, which take turns if none is chosen."""
    presets = importlib.import_module(MODEL_FROM.partition(":")[0])
    return tuple(presets.FUZZED_TURNS)


@functools.cache
def _build(text: str) -> Model:
    model, twist = chosen_model(_model_options(text)), _twist(text)
    return model if twist is None else twist.model(model)


def _twist(text: str) -> Twist | None:
    from meshpar.testing.draws import twist_named

    name = _model_options(text).twist
    return None if name is None else twist_named(name)


def _rule_changes(text: str) -> dict[str, tuple[str, ...]]:
    """Return the rules that differ from the layout's, `()` for replicated."""
    rules = _model_options(text).with_rules
    pairs = rule_pairs(rules, "--with-rules") if rules else []
    return {logical_axis: mesh_axes or () for logical_axis, mesh_axes in pairs}


def _model_options(text: str) -> argparse.Namespace:
    parser = OneLineParser(prog="meshpar fuzz")
    _add_model_arguments(parser)
    return parser.parse_args(shlex.split(text))


def _print_end(report: Report, seconds: float) -> None:
    agree = sum(result.ok for result in report.results)
    print(f"{agree} of {len(report.results)} layouts agree, {seconds:.0f} s")
    for precision in ("fp32", "bf16"):
        for worst in report.worst(precision).values():
            print(f"    {precision}: worst {worst}")
    if report.smallest is not None:
        print(f"smallest failing case: {report.smallest.explain()}")


def _as_json(report: Report, seed: int, seconds: float) -> dict[str, Any]:
    smallest = report.smallest
    return {
        "seed": seed,
        "agree": report.ok,
        "cases": [_result_json(result) for result in report.results],
        "smallest": None if smallest is None else _result_json(smallest),
        "seconds": seconds,
    }


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "layout": str(result.case.layout),
        "command": result.case.command,
        "agrees": result.ok,
        "failure": result.failure,
        "refused": result.refused,
        "worst": [
            {
                # JSON has no number for infinity.
                key: None
                if isinstance(value, float) and not math.isfinite(value)
                else value
                for key, value in asdict(worst).items()
            }
            for worst in result.worst.values()
        ],
        "seconds": result.seconds,
    }
