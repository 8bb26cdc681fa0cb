"""Time to the first tokens, and per token: ours, hand-written JAX, transformers.

    python -m recipes.bench.generation
    python -m recipes.bench.generation --batch 16
    python -m recipes.bench.generation --batch 16 --prompt 64 --tokens 3
    python -m recipes.bench.generation --weights bf16 int8

One model of SmolLM2-135M's sizes with random weights in fp32 on one CPU device. The
hand-written loop is a Llama of plain JAX with a contiguous cache; where torch and
transformers are installed, `LlamaForCausalLM` with its own cache runs too. All must
choose the same tokens; then they run in turns, each for so many tokens. Of ours with
weights of fewer bits (`--weights`) the tokens may be others. A last line says how much
of ours is not the program's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar.generation.engine import Engine
from meshpar.generation.generate import placed
from meshpar.generation.programs import Programs
from meshpar.generation.quantized import with_weights
from meshpar.generation.requests import Request
from meshpar.layout import Layout
from meshpar.models.llama import LlamaConfig
from meshpar.models.presets import PRESETS, build
from meshpar.recipes.bench.conditions import conditions, turn_ynn_off
from meshpar.recipes.bench.generation_contestants import by_hand, transformers_loop

Loop = Callable[[int], tuple[np.ndarray, float, float]]
"""Number of tokens -> (batch, tokens), and seconds: to the first token of every
prompt, and of each token after it."""


def main() -> None:
    """Measures every way and prints one table."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(1)
    config = PRESETS[args.preset]
    if not isinstance(config, LlamaConfig):
        raise SystemExit(f"--preset {args.preset}: give one of the Llama family")
    model = build(args.preset)
    params = jax.jit(model.init)(0)
    prompts = np.random.default_rng(0).integers(
        config.vocab, size=(args.batch, args.prompt)
    )
    loops: dict[str, Loop] = {
        "meshpar": _ours(model, params, prompts, args),
        "hand-written": by_hand(config, params, prompts, args.tokens),
    }
    if importlib.util.find_spec("transformers"):
        loops["transformers"] = transformers_loop(config, params, prompts)
    alike = tuple(loops)
    for kind in args.weights:
        loops[f"meshpar, {kind}"] = _ours(model, params, prompts, args, kind)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    firsts: dict[str, list[float]] = {name: [] for name in loops}
    tokens: dict[str, np.ndarray] = {}
    for run in range(args.runs + 1):
        for name, loop in loops.items():
            tokens[name], first, each = loop(args.tokens)
            if run:  # The first one compiles.
                seconds[name].append(each)
                firsts[name].append(first)
    for name in alike:
        if (tokens[name] != tokens["meshpar"]).any():
            raise SystemExit(f"{name} chooses other tokens than meshpar")
    sizes = {"batch": args.batch, "prompt": args.prompt, "tokens": args.tokens}
    print(conditions("recipes.bench.generation", 1, sizes, f"{args.runs} runs"))
    _print_times("ms a token", seconds)
    _print_times("ms to the first tokens", firsts)
    print(f"a step beside its program alone: {_host_ms(model, params, args):.2f} ms")


def _print_times(what: str, seconds: dict[str, list[float]]) -> None:
    table = Table("way", f"{what}, median", "least", "beside hand-written")
    base = statistics.median(seconds["hand-written"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        table.add_row(
            name,
            f"{1e3 * middle:.2f}",
            f"{1e3 * min(values):.2f}",
            f"{middle / base:.3f}",
        )
    Console().print(table)


def _ours(
    model: Any, params: Any, prompts: np.ndarray, args: Any, kind: str = "fp32"
) -> Loop:
    engine = _engine(model, params, args, len(prompts), kind)

    def loop(num: int) -> tuple[np.ndarray, float, float]:
        for prompt in prompts.tolist():
            engine.submit(Request(tokens=prompt, max_tokens=num))
        found: dict[int, list[int]] = {}
        start, ends = time.perf_counter(), []
        while sum(map(len, found.values())) < len(prompts) * num:
            for token in engine.step():
                found.setdefault(token.request, []).append(token.token)
            if len(found) == len(prompts):
                ends.append(time.perf_counter())
        each = (ends[-1] - ends[0]) / (len(ends) - 1)
        rows = [found[number] for number in sorted(found)]
        return np.array(rows), ends[0] - start, each

    return loop


def _engine(
    model: Any, params: Any, args: Any, slots: int, kind: str = "fp32"
) -> Engine:
    layout, devices = Layout(), jax.devices()[:1]
    if kind == "bf16":
        layout = Layout(precision="bf16", param_dtype="bf16")
    elif kind == "int8":
        model, params = with_weights(model, params, kind, layout, devices)
    programs = Programs.from_model(
        model,
        layout,
        slots=slots,
        max_seq=args.prompt + args.tokens,
        page_size=64,
        unrolled=not args.looped,
        devices=devices,
    )
    return Engine(programs, *placed(programs, model, params))


def _host_ms(model: Any, params: Any, args: Any) -> float:
    """A step less its program alone, medians of as many."""
    engine = _engine(model, params, args, args.batch)
    for _ in range(args.batch):
        engine.submit(Request(tokens=[1], max_tokens=args.tokens))
    engine.step()
    alone, whole = [], []
    programs = engine.programs
    compiled = programs.advance(random=False, truncated=False)

    def timed(*given: Any) -> Any:
        start = time.perf_counter()
        found = jax.block_until_ready(compiled(*given))
        alone.append(time.perf_counter() - start)
        return found

    programs._advances[False, False, False] = timed
    while True:
        start = time.perf_counter()
        if not engine.step():
            break
        whole.append(time.perf_counter() - start)
    return 1e3 * (statistics.median(whole) - statistics.median(alone))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="smollm2-135m", help="(%(default)s)")
    for name, default in (("batch", 1), ("prompt", 16), ("tokens", 32), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument(
        "--weights",
        nargs="*",
        choices=("bf16", "int8"),
        default=(),
        help="further dtypes of our weights to measure (none)",
    )
    parser.add_argument(
        "--looped", action="store_true", help="run our layers in a loop (unrolled)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
