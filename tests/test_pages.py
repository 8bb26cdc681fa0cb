"""Pages in a browser: they fit a desk and a telephone, and answer the pointer."""

import re

import pytest

from meshpar.cli.main import main
from tests import chromium
from tests.marks import slow

pytest.importorskip("playwright", reason="needs pip install 'meshpar[browser]'")
pytest.importorskip("plotly", reason="needs pip install 'meshpar[plots]'")
pytestmark = pytest.mark.skipif(
    chromium.chromium() is None, reason="no chromium or google-chrome on the path"
)

TIMELINE = "schedule --schedule"
SHOW = "show --hardware h100-80gb --layout"
BF16 = "remat=full,precision=bf16"

# Command -> where to point, and what must be shown there.
TIMELINE_HOVERS = [
    (".barlayer .trace:nth-child(1) .point:nth-child(1) path", "0F0: forward.*rank 0"),
    (".barlayer .trace:nth-child(2) .point:nth-child(2) path", "0B1: backward.*micro"),
]
PLAN_HOVERS = [
    (".scatterlayer .trace:nth-child(3) .point:nth-child(2)", r"fsdp=.* GB, MFU \d"),
]
SHOW_HOVERS = [
    (".heatmaplayer image >> nth=0", r"device \d+, host \d+.*(tensor|fsdp) \d"),
    (".heatmaplayer image >> nth=1", r"device \d+, host \d+.*\bshard \d+ of \d+, "),
    (".barlayer .trace .point path", r"all-.* over .*: .*"),
]

PAGES = [
    (f"{TIMELINE} 1f1b --stages 4 --microbatches 8 --plot", TIMELINE_HOVERS),
    (
        "plan --model llama3-8b --devices 8 --global-batch 16 --seq 8192 --html",
        PLAN_HOVERS,
    ),
    (
        f"{SHOW} fsdp=2,stage=2,tensor=2,microbatches=4 --preset tiny --html",
        SHOW_HOVERS,
    ),
    slow(f"{TIMELINE} 1f1b --stages 8 --microbatches 64 --plot", TIMELINE_HOVERS),
    slow(
        f"{TIMELINE} interleaved_1f1b --stages 4 --chunks 3 --microbatches 16 "
        "--hop-ms 0.1 --plot",
        TIMELINE_HOVERS[:1],
    ),
    slow(f"{TIMELINE} gpipe --stages 32 --microbatches 2 --plot", TIMELINE_HOVERS),
    slow(f"{TIMELINE} 1f1b --stages 1 --microbatches 1 --plot", TIMELINE_HOVERS[:1]),
    slow(
        "plan --model llama3-405b --hardware h100 --devices 2048 --global-batch 512 "
        "--html",
        PLAN_HOVERS,
    ),
    slow(
        "plan --model tiny --hardware h100 --devices 8 --global-batch 64 --html",
        [],
    ),
    slow(
        f"{SHOW} fsdp=2,stage=4,tensor=8,microbatches=16,{BF16} --model llama3-70b "
        "--global-batch 128 --seq 4096 --html",
        SHOW_HOVERS,
    ),
    slow(
        f"show --layout fsdp=128,tensor=4,{BF16} --hardware tpu-v5p:8x8x8 --preset "
        "llama3-70b --html",
        SHOW_HOVERS,
    ),
    slow(
        f"{SHOW} data=32,stage=8,tensor=8,microbatches=256,zero=1,{BF16} --preset "
        "llama3-405b --html",
        SHOW_HOVERS[:1],
    ),
    slow(f"{SHOW} data=1 --preset tiny --html", []),
    slow(
        "audit --preset tiny --layout fsdp=4,tensor=2 --target gpu:h100:1x8 --seq 128 "
        "--html",
        [(".barlayer .trace .point path", r"ms, (matmuls|hidden|exposed)")],
    ),
]


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as started:
        yield started


@pytest.mark.parametrize("command, hovers", PAGES)
def test_a_page_fits_and_answers_on_a_desk_and_a_telephone(
    command, hovers, browser, tmp_path, capsys
):
    path = tmp_path / "page.html"
    assert main([*command.split(), str(path)]) == 0
    for width in chromium.WIDTHS:
        with chromium.opened(browser, path, width) as page:
            assert page.overflow() <= 0
            assert page.overlaps() == []
            for selector, text in hovers:
                shown = page.hover(selector)
                assert re.search(text, shown), shown
            assert page.faults == []


SAD = """<!doctype html><body><div style="width: 2000px">wide</div>
<img src="http://localhost:9/x.png"><div class="js-plotly-plot"><svg class="main-svg">
<text x="10" y="20">one</text><text x="20" y="22">another</text></svg></div></body>"""


def test_what_the_pages_must_not_have_is_seen(browser, tmp_path):
    path = tmp_path / "sad.html"
    path.write_text(SAD)
    with chromium.opened(browser, path, 390) as page:
        assert page.overflow() > 1000
        assert page.overlaps() == [("one", "another")]
        assert any("localhost:9" in fault for fault in page.faults)
