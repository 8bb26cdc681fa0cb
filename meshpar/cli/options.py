"""Options that several subcommands share, and what they choose.

A model to build, or its sizes to plan; a layout; a machine; a batch. JAX and the
planner are imported once something is chosen, so that `--help` does not wait for them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpar.cli.parsing import (
    MODEL_FROM,
    first_line,
    import_function,
    parse_sizes,
    positive,
)
from meshpar.errors import InputError
from meshpar.layout import Layout

if TYPE_CHECKING:
    from meshpar.model.contract import Model
    from meshpar.planner.machine.cluster import Cluster
    from meshpar.planner.workload.workload import Workload

_MOST_DEVICES = 1_000_000
"""Beyond any machine, and as many as a search can factor."""

_GPT2_ONLY = ("learned_positions", "layer_norm", "biases", "tied")
"""Properties of a GPT-2 that `meshpar train --model` has no words for."""

_POSITIONS = 1024
"""Longest sequence of a GPT-2 whose words do not give `max_seq`, in tokens."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model to build."""
    parser.add_argument(
        "--preset", metavar="NAME", help="named model, such as tiny or llama3-8b"
    )
    parser.add_argument(
        "--model",
        metavar="SIZES",
        help="sizes, such as layers=4,hidden=256,heads=8 (with --preset: those to "
        "change), or the path of a Hugging Face config.json",
    )
    parser.add_argument(
        "--model-from",
        metavar="MODULE:FUNCTION",
        default=MODEL_FROM,
        help="function that builds the model from preset= and the sizes "
        "(default: %(default)s)",
    )


def add_layout_arguments(
    parser: argparse.ArgumentParser,
    *,
    seq: int | None = 128,
    seq_default: str = "%(default)s",
) -> None:
    """Add the options that choose a layout and a batch.

    Args:
        parser: The parser.
        seq: Default tokens of a sequence.
        seq_default: The same in words.
    """
    parser.add_argument(
        "--layout",
        metavar="LINE",
        required=True,
        help="layout, such as data=2,fsdp=2,tensor=2 (required)",
    )
    add_counts(
        parser,
        {
            "--devices": "devices of the machine (default: as many as the layout "
            "needs)",
            "--global-batch": "sequences per step (default: the fewest that the layout "
            "allows)",
        },
    )
    parser.add_argument(
        "--seq",
        type=positive,
        default=seq,
        metavar="N",
        help=f"tokens per sequence (default: {seq_default})",
    )


def add_counts(parser: argparse.ArgumentParser, counts: Mapping[str, str]) -> None:
    """Add options that are whole numbers of at least 1; `counts` has their help."""
    numbers = {f"{option} N": meaning for option, meaning in counts.items()}
    add_values(parser, positive, numbers)


def add_values(
    parser: argparse.ArgumentParser,
    kind: Callable[[str], Any],
    options: Mapping[str, str],
    **more: Any,
) -> None:
    """Add options whose words become values of one kind.

    Args:
        parser: The parser.
        kind: The value of a word.
        options: Option and metavar, such as `--price P` -> help.
        more: Arguments of `add_argument` for all of them.
    """
    for names, meaning in options.items():
        option, metavar = names.split()
        parser.add_argument(option, type=kind, metavar=metavar, help=meaning, **more)


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a checkpoint."""
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="folder of a run (--out), of its checkpoints, or of one checkpoint",
    )


def add_layout_and_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a layout, a model, a machine and a batch to plan."""
    parser.add_argument(
        "--layout",
        metavar="LINE",
        required=True,
        help="layout, such as fsdp=8,stage=2,tensor=8 (required)",
    )
    add_workload_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model, a machine and a batch to plan."""
    from meshpar.hardware.devices import DEVICES
    from meshpar.planner.machine.execution import EXECUTIONS, MESHPAR

    parser.add_argument(
        "--preset", metavar="NAME", help="named model, such as llama3-8b or gpt3-175b"
    )
    parser.add_argument(
        "--model",
        metavar="NAME|FILE.json|SIZES",
        help="named model, Hugging Face config.json, or sizes such as "
        "layers=4,hidden=256 (with --preset: those to change)",
    )
    parser.add_argument(
        "--model-from",
        metavar="MODULE:FUNCTION",
        help="function that returns a model of your own, which is traced on no device",
    )
    vocab = "size of the vocabulary (default: the model's)"
    add_counts(parser, {"--vocab": vocab})
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE.toml",
        default="h100-80gb",
        help=f"{', '.join(DEVICES)}; with a torus tpu-v5p:4x4x8; several kinds "
        "h100:32+a100:32 (default: %(default)s)",
    )
    add_counts(
        parser,
        {
            "--devices": "number of devices of all hosts (default: that of --layout or "
            "of the torus)",
            "--hosts": "number of hosts, or of TPU slices (default: the fewest that "
            "hold the devices)",
            "--global-batch": "sequences per step (default: one per microbatch and "
            "device; required by plan)",
            "--seq": "tokens per sequence (default: the model's)",
        },
    )
    parser.add_argument(
        "--execution",
        default=MESHPAR.name,
        metavar="NAME",
        help=f"training program: {', '.join(EXECUTIONS)}, "
        "or a .toml file (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout"
    )


def chosen_layout(args: argparse.Namespace) -> Layout:
    """Return the layout of the options.

    Raises:
        InputError: It cannot be read, does not fit `--devices`, or has a -1 without it.
    """
    layout = Layout.parse(args.layout)
    if args.devices is not None:
        return layout.resolve(args.devices)
    check_sizes(layout)
    return layout


def check_sizes(layout: Layout) -> None:
    """Refuse a mesh axis of -1, as the command line does not give the devices."""
    layout.check_sizes("give --devices N, or give the axis a size")


def chosen_model(args: argparse.Namespace) -> Model:
    """Return the model of the options.

    Raises:
        InputError: There is no such builder, preset or size, or it builds no model.
    """
    from meshpar.model.contract import Model

    build = import_function(args.model_from, "--model-from")
    chosen: dict[str, Any] = {}
    if args.preset:
        chosen["preset"] = args.preset
    if args.model and Path(args.model).suffix == ".json":
        chosen["config_json"] = args.model
    elif args.model:
        chosen.update(parse_sizes(args.model))
    if not chosen and args.model_from == MODEL_FROM:
        raise InputError(
            "no model is chosen; give --preset NAME or --model SIZES",
            key="command.no_model",
        )
    try:
        model = build(**chosen)
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # From a user's own function.
        raise InputError(
            f"--model-from {args.model_from!r} cannot be called with "
            f"{', '.join(chosen) or 'nothing'}: {first_line(error)}; give the sizes "
            "it takes, or name another function",
            key="command.bad_model_function",
        ) from error
    if not isinstance(model, Model):
        raise InputError(
            f"--model-from {args.model_from!r} gives a {type(model).__name__}, not a "
            "meshpar.Model; name a function that returns one",
            key="command.no_model_returned",
        )
    return model


def chosen_workload(args: argparse.Namespace) -> Workload:
    """Return the workload of the options.

    Raises:
        InputError: None is chosen, or it does not exist.
    """
    if args.model_from is not None or is_traced_preset(args):
        return _own_workload(args)
    if args.preset is None and args.model is None:
        raise InputError(
            "no model is chosen; give --preset NAME, --model SIZES or --model-from "
            "MODULE:FUNCTION",
            key="command.no_model",
        )
    from meshpar.planner.workload.shapes import workload_of

    words = None if args.vocab is None else f"vocab={args.vocab}"
    if args.preset is None:
        return workload_of(args.model, words=words)
    changed = [part for part in (args.model, words) if part]
    return workload_of(args.preset, words=",".join(changed) or None)


def is_traced_preset(args: argparse.Namespace) -> bool:
    """Return True if the options name a preset whose arithmetic only a trace tells."""
    from meshpar.planner.workload.shapes import TRACED

    return args.model_from is None and (args.preset or args.model) in TRACED


def _own_workload(args: argparse.Namespace) -> Workload:
    """Return the workload of a model that has to be traced.

    Raises:
        InputError: `--seq` is missing, or is given and the model's inputs have sizes;
            `--vocab` is given; or the model reads volumes or grids.
    """
    import jax

    from meshpar.model.inputs import BATCH_DIM, logical_sizes
    from meshpar.model.tracing import traced_streams
    from meshpar.parallel.grids.space import has_space
    from meshpar.planner.from_model import traced_workload

    jax.config.update("jax_platforms", "cpu")  # This process only traces.
    model, name = planned_model(args), args.model_from or args.preset or args.model
    option = "--preset" if args.model_from is None else "--model-from"
    asked = f"{option} {name!r}"
    if args.vocab is not None and args.model_from is not None:
        raise InputError(
            f"--vocab {args.vocab} changes sizes of a named model; give what "
            f"{args.model_from!r} takes, such as --model vocab={args.vocab}",
            key="command.vocab_of_own_model",
        )
    if has_space(model):
        raise InputError(
            f"{args.model_from!r} reads volumes or grids, which are planned as presets "
            "only; list what it sends with meshpar audit",
            key="command.volumes_of_own_model",
        )
    axes, seq = {*logical_sizes(model.known_inputs)} - {BATCH_DIM}, args.seq
    if axes and seq is None:
        raise InputError(
            f"the inputs of {asked} leave the size of "
            f"{', '.join(sorted(axes))} open; give --seq N",
            key="command.no_seq_of_model",
        )
    if not axes and seq is not None:
        raise InputError(
            f"the inputs of {name!r} have fixed sizes; leave --seq {seq} out",
            key="command.seq_of_fixed_sizes",
        )
    if seq is None:  # Tokens are the dims between the examples and the features.
        stream = jax.tree.leaves(traced_streams(model, 1, 1)[0])[0]
        seq = math.prod(stream.shape[1:-1])
    return traced_workload(model, seq=seq, name=name)


def model_words(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return `--preset` and `--model` of `meshpar train` for the planned model."""
    from meshpar.planner.workload.shapes import OTHER_SHAPES, SHAPES

    preset, sizes = args.preset, args.model
    if sizes in SHAPES or sizes in OTHER_SHAPES:
        preset, sizes = sizes, None
    vocab = None if args.vocab is None else f"vocab={args.vocab}"
    return preset, ",".join(part for part in (sizes, vocab) if part) or None


def chosen_cluster(args: argparse.Namespace, layout: Layout | None = None) -> Cluster:
    """Return the cluster of the options; by default of as many devices as the layout.

    Raises:
        InputError: Unknown hardware, or counts that do not fit together.
    """
    from meshpar.planner.machine.clusters import cluster_of

    devices = args.devices
    if devices is None and layout is not None and ":" not in args.hardware:
        check_sizes(layout)
        devices = layout.num_devices
    if max(devices or 0, args.hosts or 0) > _MOST_DEVICES:
        raise InputError(
            f"{devices or args.hosts} devices or hosts: give at most {_MOST_DEVICES}",
            key="command.too_many_devices",
        )
    return cluster_of(args.hardware, devices=devices, hosts=args.hosts)


def planned_model(args: argparse.Namespace) -> Model:
    """Return the model to build of the options that gave the planner its sizes.

    Raises:
        InputError: The planner knows its sizes, but there is no such model to build.
    """
    if args.model_from is not None:
        return chosen_model(args)
    if args.vocab is not None and (args.model or "").endswith(".json"):
        raise InputError(
            f"--vocab {args.vocab} changes the planner's sizes, not the model of "
            f"{args.model}; change vocab_size in the file",
            key="command.vocab_of_config_file",
        )
    preset, sizes = model_words(args)
    chosen = argparse.Namespace(preset=preset, model=sizes, model_from=MODEL_FROM)
    return chosen_model(chosen)


def words_to_train(
    words: str | None, preset: str | None, workload: Workload, seq: int
) -> str | None:
    """Return the words of `meshpar train --model` that build the planned model.

    Args:
        words: Words of `meshpar plan --model`.
        preset: Preset that they change, if any.
        workload: The planned workload.
        seq: Tokens of a sequence.

    Raises:
        InputError: No words do.
    """
    if not words or "=" not in words:
        return words
    sizes = parse_sizes(words)
    parts = dict(part.split("=", 1) for part in words.split(","))
    is_gpt2 = preset is None and not workload.experts and not workload.gated
    own = [name for name in _GPT2_ONLY if sizes.get(name) not in (None, False)]
    planned = own and own != [*_GPT2_ONLY] if is_gpt2 else own and own != ["tied"]
    if planned:
        raise InputError(
            f"{', '.join(own)} are of no model here together; give --model words with "
            f"{', '.join(_GPT2_ONLY)} all true, which are a GPT-2, or none",
            key="command.words_of_no_model",
        )
    for name in _GPT2_ONLY if is_gpt2 else _GPT2_ONLY[:3]:
        parts.pop(name, None)
    if workload.experts:
        parts.setdefault("expert_ffn", str(workload.expert_ffn))
    elif workload.gated and preset is None:
        parts.setdefault("ffn", str(workload.ffn))
    positions = workload.seq if "seq" in sizes or preset else _POSITIONS
    learned = is_gpt2 or workload.learned_positions
    if learned and "max_seq" not in parts and seq > positions:
        parts["seq"] = str(seq)
    return ",".join(f"{name}={value}" for name, value in parts.items())
