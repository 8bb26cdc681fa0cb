"""Shared by all tests: see `meshpar_emulate` in pyproject.toml for the 8 devices."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Generator
from pathlib import Path

import jax
import pytest

from tests.refusals import refuses as refuses
from tests.refusals import refuses_command as refuses_command
from tests.refusals import refuses_recipe as refuses_recipe

ROOT = Path(__file__).parents[1]

# Tests compile much and run little. What partitions a program and places collectives
# comes before the code of its kernels, in which these save most of the suite's time;
# kernels are compiled in one piece, as there are no cores left for several.
_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):  # jaxlib 0.12 has no such flag, and aborts on it
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()

# A program that another worker, test or run has compiled is read from here, by child
# processes too. Small ones are compiled sooner than they are read.
_CACHE = {
    "jax_compilation_cache_dir": str(ROOT / ".pytest_cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
}
for _option, _value in _CACHE.items():
    jax.config.update(_option, _value)
    os.environ[_option.upper()] = str(_value)

# Programs live as long as their tests' worker. To look through all of them for garbage,
# at Python's usual times, took 28 of 322 s of one worker and 24 of 278 s of the other
# (a part of the suite, Python 3.11.7, 2 cores, 2026-11-23).
gc.set_threshold(5_000, 20, 20)


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of two scenes, small enough to validate on in one batch."""
    play = (
        Path(__file__).parents[1] / "recipes" / "data" / "shakespeare" / "macbeth.txt"
    )
    path = tmp_path_factory.mktemp("text") / "scenes.txt"
    path.write_text(play.read_text()[:20_000])
    return path


def rows(path: Path, key: str) -> list:
    """The values of one key in a file of JSON lines, rows without it left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line[key] for line in lines if key in line]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported and collected, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


LONGEST = ("test_zoo", "test_documents", "test_train", "test_generation", "test_kill")
"""Files that begin first, so that no worker is left with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of sentences, which `make words` runs alone; order the files."""
    for item in items:
        if "snapshot" in getattr(item, "fixturenames", ()):
            item.add_marker("words")
    items.sort(key=lambda item: item.path.stem not in LONGEST)
