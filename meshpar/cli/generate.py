"""Generate text from a checkpoint, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshpar.cli.options import add_counts, add_values
from meshpar.cli.parsing import (
    above_zero,
    import_function,
    not_negative,
    one_line,
    positive,
    print_error,
)
from meshpar.data.documents import split_lines
from meshpar.distributed import Processes, exit_status, find_place, leave, start
from meshpar.distributed.cluster import is_kubernetes_pod
from meshpar.errors import InputError, local_path, printable
from meshpar.foreign_files import open_file
from meshpar.layout import Layout
from meshpar.machine.emulate import DEFAULT_DEVICES, emulate, num_cpu_devices

_LOAD = "meshpar.recipes.loaded:load"
"""Function that reads a model; the library imports no recipe before it runs."""

_REFUSE = "meshpar.recipes.joined:refuse_different"
"""Function that compares the options of several processes."""

_NOT_SHARED = ("run", "parser", "process_id")
"""Parsed values that differ from process to process, or are no option."""

_MOST_BYTES = 1 << 26
"""Size limit of a file of prompts: 64 MiB."""

EXAMPLE = "meshpar generate --from runs/mine --layout tensor=2 --prompt 'To be'"
STATUSES = "0 done, 2 bad input"

_NUMBERS: dict[str, tuple[Callable[[str], Any], float, str]] = {
    "--max-tokens N": (positive, 64, "largest number of tokens to add"),
    "--temperature T": (
        float,
        0.0,
        "sampling temperature; 0 takes the likeliest token",
    ),
    "--top-k N": (not_negative, 0, "sample from the N likeliest tokens; 0: all"),
    "--top-p P": (above_zero, 1.0, "sample from the likeliest of total probability P"),
    "--min-p P": (float, 0.0, "drop tokens below P times the likeliest"),
    "--seed N": (not_negative, 0, "seed of the first prompt"),
}
"""Options that are a number: type, default, and words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        required=True,
        metavar="CKPT|DIR|FILE.gguf",
        help="folder of a run, folder with config.json and safetensors, or GGUF file "
        "(required)",
    )
    add_counts(parser, {"--step": "step of a run (default: the newest)"})
    layout = "layout (default: %(default)s)"
    add("--layout", default="data=1", metavar="LINE", help=layout)
    prompt = "prompt; may be repeated (default: the lines of --prompts)"
    add("--prompt", action="append", metavar="TEXT", help=prompt)
    add(
        "--prompts",
        metavar="FILE",
        help="file of one prompt per line; - is standard input (default: -, if there "
        "is no --prompt)",
    )
    add(
        "--weights",
        choices=("int8", "fp8"),
        help="8-bit dtype of the blocks' matrices (default: the layout's dtype)",
    )
    add(
        "--average",
        action="store_true",
        help="use the average of the parameters that the run kept (--ema-decay, "
        "schedule_free) in place of the trained ones",
    )
    add("--tokenizer", metavar="FILE", help="tokenizer.json (default: the model's)")
    for option, (kind, default, words) in _NUMBERS.items():
        what = f"{words} (default: %(default)s)"
        add_values(parser, kind, {option: what}, default=default)
    stop = "end a text at this string; may be repeated (default: none)"
    add("--stop", action="append", metavar="TEXT", help=stop)
    slots = "prompts that run at once (default: all, up to 32 per device)"
    add_counts(parser, {"--slots": slots})
    add(
        "--unrolled",
        action=argparse.BooleanOptionalAction,
        help="compile programs without a loop over layers: slower to compile, faster "
        "per token (default: if the run is long enough to gain)",
    )
    devices = (
        "virtual CPU devices per process; 0: real devices, such as GPUs (default: as "
        "many as the layout needs)"
    )
    add_values(parser, not_negative, {"--emulate N": devices})
    add(
        "--raw",
        action="store_true",
        help="print control characters of a text unchanged (default: escaped, because "
        "they may change the terminal)",
    )
    _add_joined_arguments(parser)
    add("--json", action="store_true", help="print one JSON array on stdout")


def run(args: argparse.Namespace) -> int:
    """Generate and print; a single prompt's text as it comes.

    Of several processes the first reads the prompts and prints.
    """
    layout = Layout.parse(args.layout)
    devices = _num_emulated(args.emulate, layout, _num_processes(args))
    return _run_joined(args, devices, lambda processes: _run(args, layout, processes))


def _run(args: argparse.Namespace, layout: Layout, processes: Processes) -> int:
    prompts = processes.gather(_prompts(args) if processes.is_first else None)[0]
    loaded = import_function(_LOAD, "load")(
        args.source,
        step=args.step,
        tokenizer=args.tokenizer,
        average=args.average,
    )
    found = _generated(args, layout, loaded, prompts, prints=processes.is_first)
    if not processes.is_first:
        return 0
    if args.json:
        print(json.dumps(found))
    elif len(prompts) > 1:
        for one in found:
            print(_for_terminal(args, f"{one['prompt']}{one['text']}"))
    return 0


def _num_emulated(given: int | None, layout: Layout, num_processes: int | None) -> int:
    """Return the virtual devices of each process: as given, or as the layout needs."""
    if given is not None:
        return given
    if num_processes is None:
        raise InputError(
            "Kubernetes says how many pods the Job has only once they are joined: give "
            "--emulate 0 for the pods' own devices, or N virtual ones of each",
            key="processes.unknown_number",
        )
    needed = DEFAULT_DEVICES if layout.is_open else layout.num_devices
    if needed % num_processes:
        raise InputError(
            f"layout {str(layout)!r} needs {needed} devices, which do not divide over "
            f"{num_processes} processes; give a layout of a multiple",
            key="processes.indivisible_devices",
        )
    return max(needed // num_processes, num_cpu_devices())


def _generated(
    args: argparse.Namespace,
    layout: Layout,
    loaded: Any,
    prompts: list[str],
    *,
    prints: bool,
) -> list[dict[str, Any]]:
    import jax

    from meshpar.generation.cache_plan import reads_source
    from meshpar.generation.generate import decoder_start, make_engine, make_requests
    from meshpar.generation.sampling import Sampling

    devices = jax.devices()
    layout = layout.resolve(len(devices)) if layout.is_open else layout
    start = loaded.start_tokens if reads_source(loaded.model) else None
    requests = make_requests(
        prompts,
        loaded.tokenizer,
        max_tokens=args.max_tokens,
        sampling=Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
        ),
        stop=tuple(args.stop or ()),
        stop_tokens=loaded.stop_tokens,
        start_tokens=decoder_start(loaded.model, start),
    )
    engine = make_engine(
        loaded.model,
        loaded.params,
        requests,
        layout,
        model_state=loaded.model_state,
        weights=args.weights,
        tokenizer=loaded.tokenizer,
        slots=args.slots,
        unrolled=args.unrolled,
        devices=devices[: layout.num_devices],
    )
    for note in engine.programs.notes if prints else ():
        print(f"note: {note}", file=sys.stderr)
    streams = prints and len(prompts) == 1 and not args.json
    show = partial(_for_terminal, args) if streams else None
    return _completed(engine, prompts, requests, show)


def _for_terminal(args: argparse.Namespace, text: str) -> str:
    return text if args.raw else printable(text)


def _completed(
    engine: Any,
    prompts: list[str],
    requests: Any,
    show: Callable[[str], str] | None,
) -> list[dict[str, Any]]:
    """Run all requests; print the text of a single prompt through `show`."""
    for request in requests:
        engine.submit(request)
    found: list[dict[str, Any]] = [
        {"prompt": prompt, "text": "", "tokens": [], "logprobs": []}
        for prompt in prompts
    ]
    shown = ""
    if show:
        print(show(prompts[0]), end="", flush=True)
    for token in engine.run():
        one = found[token.request]
        if token.token >= 0:
            one["tokens"].append(token.token)
            one["logprobs"].append(token.logprob)
        one["text"] = engine.text(token.request)
        if show:
            ready = one["text"]
            if token.finish is None:
                ready = _surely_shown(ready, requests[0].stop)
            print(show(ready[len(shown) :]), end="", flush=True)
            shown = ready
    if show:
        print()
    return found


def _surely_shown(text: str, stops: tuple[str, ...]) -> str:
    r"""Return the text without an end that the next token may change.

    Such an end is bytes that are no text yet, or the beginning of a text to stop at.

    Example:
        >>> _surely_shown("To be, or n", stops=("not",)), _surely_shown("a\ufffd", ())
        ('To be, or ', 'a')
    """
    text = text.rstrip("\ufffd")
    tails = (
        size
        for stop in stops
        for size in range(len(stop) - 1, 0, -1)
        if text.endswith(stop[:size])
    )
    return text[: len(text) - max(tails, default=0)]


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or ())
    if args.prompts not in (None, "-"):
        file = local_path("--prompts", args.prompts)
        prompts += _lines(repr(args.prompts), partial(_read_prompts, file))
    elif args.prompts == "-" or not prompts:
        prompts += _lines("standard input", sys.stdin.read)
    if not prompts:
        raise InputError(
            "no prompt; give --prompt TEXT, or lines in --prompts FILE",
            key="generation.no_prompt",
        )
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt {prompt[:40]!r} is not UTF-8 text: character {error.start} is "
                "another byte; write it in UTF-8",
                key="generation.prompt_not_utf8",
            ) from error
    return prompts


def _read_prompts(file: Path) -> str:
    with open_file(file) as opened:
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise InputError(
            f"{str(file)!r} has more than {_MOST_BYTES:,} bytes, and all prompts are "
            "in memory; give them in several files",
            key="generation.too_many_prompts",
        )
    return content.decode("utf-8")


def _lines(name: str, read: Callable[[], str]) -> list[str]:
    try:
        return split_lines(read())
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: byte {error.start} is "
            f"{error.object[error.start]:#04x}; convert it, such as by iconv",
            key="generation.input_not_utf8",
        ) from error


def _add_joined_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options by which processes find one another."""
    address = (
        "address of process 0, to connect processes by hand with the next two options "
        "(default: detected under SLURM, Open MPI, on TPU pods and, with --emulate, "
        "Kubernetes)"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=address)
    started = "number of processes (default: detected)"
    add_counts(parser, {"--num-processes": started})
    number = "number of this process, from 0 (default: detected)"
    add_values(parser, int, {"--process-id I": number})
    limit = "seconds within which all processes must join (default: %(default)s)"
    add_values(parser, positive, {"--start-timeout S": limit}, default=50)


def _num_processes(args: argparse.Namespace) -> int | None:
    """Return the number of processes that the options or the scheduler give.

    None in a pod of Kubernetes, which knows it only once all have joined.
    """
    if args.num_processes is not None:
        return args.num_processes
    place = find_place()
    if place is None and is_kubernetes_pod():
        return None
    return 1 if place is None else place.num_processes


def _run_joined(
    args: argparse.Namespace, devices: int, run: Callable[[Processes], int]
) -> int:
    """Join the processes of the job, run `run` in each, and return the exit status.

    Args:
        args: The options, which must be the same in all processes.
        devices: Virtual CPU devices of each process; 0 for the machine's own.
        run: The work; a process that fails ends the others.

    Raises:
        InputError: The only process fails; each of several prints its error and ends.
    """
    alone = _num_processes(args) == 1
    stdout = contextlib.nullcontext() if alone else _own_stdout()
    try:
        with (
            stdout,
            start(
                coordinator=args.coordinator,
                num_processes=args.num_processes,
                process_id=args.process_id,
                emulate=devices or None,
                job=os.environ.get("SLURM_JOB_ID", ""),
                timeout_s=args.start_timeout,
            ) as processes,
        ):
            alone = processes.num_processes == 1
            if not alone:
                options = {
                    name: value
                    for name, value in vars(args).items()
                    if name not in _NOT_SHARED
                }
                import_function(_REFUSE, "joined")(processes.gather(options))
            elif devices:
                emulate(devices)
            return run(processes)
    except (InputError, OSError) as error:
        if alone:
            raise
        print(f"meshpar {args.subcommand}: {one_line(error)}", file=sys.stderr)
        print_error(error, as_json=args.json and _is_first(args))
        return leave(exit_status(error))


def _is_first(args: argparse.Namespace) -> bool:
    """Return whether this is process 0; True in every pod, which does not know."""
    by_hand = (args.coordinator, args.num_processes, args.process_id)
    if any(value is not None for value in by_hand):
        return not args.process_id
    place = find_place()
    return place is None or place.process_id == 0


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Send what gloo prints of its connections to stderr, where it breaks no JSON."""
    with os.fdopen(os.dup(1), "w") as ours, contextlib.redirect_stdout(ours):
        os.dup2(2, 1)
        try:
            yield
        finally:
            ours.flush()
            os.dup2(ours.fileno(), 1)
