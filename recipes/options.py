"""The options of `recipes.pretrain`, each with its default."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from meshpar.cli.parsing import OneLineParser, positive
from recipes.texts import SHAKESPEARE

LAYOUT = "data=2,stage=2,tensor=2,microbatches=4"
_SUMMARY = "Pretrain a language model on a text, under any layout."


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, and the defaults that follow from others."""
    parser = OneLineParser(prog="pretrain", description=_SUMMARY)
    add = parser.add_argument
    add("--layout", default=LAYOUT, help="the layout's line")
    add("--schedule", type=Path, help="CSV file of orders, one row a rank")
    add("--preset", default="tiny", help="a name in models.presets.PRESETS")
    add("--steps", type=positive, default=150, help="optimizer steps in all")
    add("--seed", type=int, default=0, help="of initial values, data order, samples")
    add("--dtype", choices=("fp32", "bf16"), help="arithmetic; the layout's by default")
    add("--text", type=Path, default=SHAKESPEARE, help="a file, or a folder of .txt")
    add("--out", type=Path, help="folder of the run (default: runs/ and the time)")
    add("--resume", action="store_true", help="go on from the newest checkpoint there")
    add("--log-json", type=Path, help="metrics file (default: OUT/metrics.jsonl)")
    add("--global-batch", type=positive, default=32, help="sequences in a step")
    add("--seq", type=positive, default=128, help="tokens of a sequence")
    add("--learning-rate", type=float, default=3e-3, help="its peak")
    add("--save-every", type=positive, default=200, help="steps between checkpoints")
    add("--validate-every", type=positive, default=100, help="steps between looks")
    add("--stop-after", type=positive, help="save and stop after this step")
    add("--sample-tokens", type=int, default=160, help="bytes to write at the end")
    add("--bubble-rounds", type=int, default=5, help="steps that time it; 0: do not")
    number = int(os.environ.get("MESHPAR_EMULATE") or 8)
    add("--emulate", type=int, default=number, help="virtual CPU devices; 0: real ones")
    args = parser.parse_args(argv)
    if args.resume and args.out is None:
        parser.error("--resume needs the folder of the run: give --out DIR")
    args.out = args.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    args.log_json = args.log_json or args.out / "metrics.jsonl"
    return args
