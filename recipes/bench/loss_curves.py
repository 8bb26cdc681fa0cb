"""Draw loss curves of several runs of `recipes/pretrain.py`.

    python -m recipes.pretrain --steps 300 --layout LINE --log-json fp32.jsonl
    python -m recipes.pretrain --steps 300 --layout LINE,precision=bf16,... \\
        --log-json bf16.jsonl
    python -m recipes.bench.loss_curves fp32.jsonl bf16.jsonl --png curves.png

prints the last validation losses and by how much they differ from the first file's. The
picture needs matplotlib: `pip install 'meshpar[plots]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from meshpar.errors import install_extra

Curve = list[tuple[int, float]]


def main(argv: list[str] | None = None) -> int:
    """Prints the losses and draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.loss_curves")
    parser.add_argument("metrics", type=Path, nargs="+", help="files of --log-json")
    parser.add_argument("--png", type=Path, help="file of the picture")
    args = parser.parse_args(argv)
    for path in args.metrics:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    last = {path.stem: _curve(path, "validation_loss")[-1] for path in args.metrics}
    for line in differences(last):
        print(line)
    if args.png is not None:
        _draw(args.metrics, args.png)
    return 0


def differences(last: dict[str, tuple[int, float]]) -> list[str]:
    """A line for each run: its last validation loss, and beside the first run's."""
    first = next(iter(last.values()))[1]
    return [
        f"{name}: validation {loss:.4f} after {step + 1} steps, {loss / first - 1:+.2%}"
        for name, (step, loss) in last.items()
    ]


def _curve(path: Path, key: str) -> Curve:
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["step"], row[key]) for row in rows if key in row]


def _draw(metrics: list[Path], png: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit(f"--png needs matplotlib: {install_extra('plots')}")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for path in metrics:
        (line,) = axes.plot(*zip(*_curve(path, "loss"), strict=True), alpha=0.4)
        validation = zip(*_curve(path, "validation_loss"), strict=True)
        axes.plot(*validation, "o-", color=line.get_color(), label=path.stem)
    axes.set(xlabel="step", ylabel="loss, nats per byte (dots: validation)")
    axes.legend()
    figure.savefig(png, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
