"""Print the planner's error against published runs, and draw it.

    python -m recipes.bench.planner_validation --png recipes/planner_validation.png

prints what `meshpar plan --validate` prints and draws predicted against measured. The
picture needs matplotlib: `pip install 'meshpar[plots]'`. `--write` writes the range of
each regime to `meshpar/planner/known_errors.json`, which plans print.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

from meshpar.errors import install_extra
from meshpar.planner import known_errors
from meshpar.planner.published import validate
from meshpar.planner.published.megatron import Measured

_QUANTITIES = {"step": "step time, s", "memory": "memory of a device, GB"}

_MARKERS = "osD^vPX*<>h"
"""One more than there are colors, so that no two series look alike."""

_LEGEND_ROWS = 14


def main(argv: list[str] | None = None) -> int:
    """Prints the table and draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.planner_validation")
    parser.add_argument("--png", type=Path, help="file of the picture")
    parser.add_argument(
        "--write", action="store_true", help="write the ranges that plans print"
    )
    args = parser.parse_args(argv)
    rows = validate.rows()
    print(validate.text(rows))
    if args.write:
        ranges = validate.error_ranges(rows)
        found = {name: its._asdict() for name, its in ranges.items()}
        known_errors.FILE.write_text(json.dumps(found, indent=1) + "\n")
    if args.png is not None:
        _draw(rows, args.png)
    return 0


def series(rows: list[Measured], quantity: str) -> dict[str, list[Measured]]:
    """The rows of one quantity by source; all that do not count are a series each."""
    found: dict[str, list[Measured]] = {}
    for row in rows:
        if row.quantity == quantity:
            label = "calibrates" if row.calibrates else row.apart or row.source
            found.setdefault(label, []).append(row)
    return found


def _draw(rows: list[Measured], png: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError:
        sys.exit(f"--png needs matplotlib: {install_extra('plots')}")
    figure = Figure(figsize=(12, 9), layout="constrained")
    for axes, (quantity, name) in zip(
        figure.subplots(1, 2), _QUANTITIES.items(), strict=True
    ):
        groups = series(rows, quantity)
        markers = itertools.cycle(_MARKERS)
        for (label, group), marker in zip(groups.items(), markers, strict=False):
            measured = [row.measured for row in group]
            predicted = [row.predicted for row in group]
            axes.loglog(measured, predicted, marker, alpha=0.7, label=label)
        ends = [min(row.measured for one in groups.values() for row in one)]
        ends += [max(row.measured for one in groups.values() for row in one)]
        axes.plot(ends, ends, color="black", linewidth=0.8, label="equal")
        for share in (0.88, 1.12):
            axes.plot(ends, [share * end for end in ends], "k:", linewidth=0.8)
        axes.set(xlabel=f"measured {name}", ylabel="predicted (dotted: 12 % off)")
        subs = (1, 2, 5) if ends[1] < 100 * ends[0] else (1,)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        columns = -(-len(groups) // _LEGEND_ROWS)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1)}
        axes.legend(fontsize=7, ncols=columns, **below)
    figure.savefig(png, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
