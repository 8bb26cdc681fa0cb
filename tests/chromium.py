"""Chromium without a window: opens a page, and says what a reader would see."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (1280, 390)
"""A desk's, and a telephone's."""

_HEIGHT = 900
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)

_TEXTS = """plot => [...plot.querySelectorAll('svg text')].map(text => {
  const style = getComputedStyle(text), box = text.getBoundingClientRect();
  return {text: text.textContent, left: box.left, right: box.right, top: box.top,
          bottom: box.bottom, seen: style.display != 'none' && box.width > 0.5 &&
          style.visibility != 'hidden' && style.opacity != '0'};
}).filter(box => box.seen && box.text.trim())"""


@dataclass
class Opened:
    """A page in the browser.

    Args:
        page: It.
        faults: What the console, the scripts and the network had to say.
    """

    page: Page
    faults: list[str] = field(default_factory=list)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.page.evaluate("document.scrollingElement.scrollWidth - innerWidth")

    def overlaps(self) -> list[tuple[str, str]]:
        """Pairs of texts of one plot that cover one another."""
        found = []
        for plot in self.page.query_selector_all(".js-plotly-plot"):
            texts = sorted(plot.evaluate(_TEXTS), key=lambda box: box["left"])
            for place, one in enumerate(texts):
                for other in texts[place + 1 :]:
                    if other["left"] >= one["right"] - 1:
                        break
                    if min(one["bottom"], other["bottom"]) - 1 > max(
                        one["top"], other["top"]
                    ):
                        found.append((one["text"], other["text"]))
        return found

    def hover(self, selector: str, *, at: tuple[float, float] = (0.5, 0.5)) -> str:
        """What is shown beside the pointer at a place of the first such mark."""
        mark = self.page.locator(selector).first
        mark.scroll_into_view_if_needed()
        box = mark.bounding_box()
        assert box is not None, selector
        self.page.mouse.move(
            box["x"] + at[0] * box["width"], box["y"] + at[1] * box["height"]
        )
        shown = self.page.locator(".hoverlayer .hovertext").first
        shown.wait_for(timeout=5000)
        return shown.text_content() or ""


def chromium() -> str | None:
    """Where Chromium is, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium(), args=list(_ARGUMENTS)
        )
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, path: Path, width: int) -> Iterator[Opened]:
    """The page of a file once its plots are drawn."""
    page = browser.new_page(viewport={"width": width, "height": _HEIGHT})
    found = Opened(page)
    page.on("pageerror", lambda error: found.faults.append(str(error)))
    page.on("console", lambda message: _note(found, message.type, message.text))
    page.on("request", lambda request: _note(found, "request", request.url))
    page.goto(path.as_uri())
    page.wait_for_function(
        "[...document.querySelectorAll('.js-plotly-plot')]"
        ".every(plot => plot.querySelector('.main-svg'))"
    )
    page.wait_for_timeout(100)  # margins settle in a second pass
    yield found
    page.close()


def _note(found: Opened, kind: str, text: str) -> None:
    local = kind == "request" and text.startswith(("file:", "data:", "blob:"))
    if kind in ("error", "warning", "request") and not local:
        found.faults.append(f"{kind}: {text}")
