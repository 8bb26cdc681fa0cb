"""The pictures of docs/images: pages in Chromium, and a timeline in a file.

    python -m tests.screenshots docs/images        (or: make screenshots)

Each page is taken at the width of a desk and of a telephone, down to `_MOST_HEIGHT`
pixels, in colours enough for text and bars; README shows the top of one, and links to
the documentation show a card. It needs Chromium and the extras `plots` and `browser`.
"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from meshpar.cli.main import main as meshpar
from tests import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_MOST_HEIGHT = {1280: 3200, 390: 5400}
_TOP = 1240
_COLORS = 256

_SCHEDULE = "schedule --schedule 1f1b --hop-ms 0.1 --stages"
_MODEL = "--model llama3-70b --hardware h100-80gb --global-batch 128 --seq 4096"
_LAYOUT = "fsdp=2,stage=4,tensor=8,microbatches=16,remat=full,precision=bf16"

PAGES = {
    "timeline": f"{_SCHEDULE} 4 --microbatches 16 --plot",
    "plan": f"plan {_MODEL} --devices 64 --html",
    "show": f"show {_MODEL} --layout {_LAYOUT} --html",
}
"""Name -> the command that writes the page, its path left out."""


_CARD = """<body style="margin: 0; width: 1200px; height: 630px; display: flex;
  align-items: center; font-family: sans-serif; background: #37474f; color: white">
<img src="{logo}" width="300" style="margin: 0 50px 0 60px">
<div><div style="font-size: 110px; font-weight: bold">meshpar</div>
<div style="font-size: 40px; line-height: 1.4">Train one JAX model under any parallelism
by changing one string</div></div></body>"""


def main(folder: Path) -> None:
    """Writes all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, chromium.browser() as browser:
        for name, command in PAGES.items():
            path = Path(temporary) / f"{name}.html"
            assert meshpar([*command.split(), str(path)]) == 0, command
            for width in chromium.WIDTHS:
                with chromium.opened(browser, path, width) as opened:
                    taken = opened.page.locator("html").screenshot()
                _save(taken, folder / f"{name}-{width}.png")
        _save(_card(browser, Path(temporary), folder), folder / "social.png")
    with Image.open(folder / "show-1280.png") as image:
        top = image.crop((0, 0, image.width, _TOP))
        top.save(folder / "show-top.png", optimize=True)
    picture = folder / "timeline.png"
    command = f"{_SCHEDULE} 8 --microbatches 64 --plot {picture}"
    assert meshpar(command.split()) == 0, command
    _save(picture.read_bytes(), picture)


def _card(browser: Browser, temporary: Path, folder: Path) -> bytes:
    """Return the picture that a link to the documentation shows elsewhere."""
    path = temporary / "card.html"
    path.write_text(_CARD.format(logo=(folder / "logo.svg").resolve().as_uri()))
    with chromium.opened(browser, path, 1200) as opened:
        clip = {"x": 0, "y": 0, "width": 1200, "height": 630}
        return opened.page.screenshot(clip=clip)


def _save(taken: bytes, path: Path) -> None:
    image = Image.open(BytesIO(taken)).convert("RGB")
    height = min(image.height, _MOST_HEIGHT.get(image.width, image.height))
    image = image.crop((0, 0, image.width, height))
    few = image.quantize(_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
