"""Every program in README and in the documentation runs as it stands there."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

import meshpar
import meshpar.schedules
import meshpar.testing
from meshpar.cli.main import SUBCOMMANDS
from tests import chromium, marks, warm
from tests.documents import ROOT, RUN, SHOWN, blocks, documents

ALL = {document: [*blocks(document)] for document in documents()}

# A block that no test runs says why, in a comment before it, and is counted here.
NOT_RUN = {
    "CONTRIBUTING.md": 2,  # the tests themselves, a part of a test
    "README.md": 2,  # installs what is being tested; the run and the tests
    "docs/guides/many_hosts.md": 2,  # a process on every host
    "docs/guides/planner.md": 1,  # half a minute; tests/test_planner_validate.py has it
    "docs/guides/weights.md": 2,  # a download
    "docs/install.md": 1,  # installs what is being tested
    "recipes/README.md": 27,  # minutes each
}

COMMANDS = "docs/commands.md"
LONG_PAGES = {"docs/guides/any_model.md"}
"""Pages that train many models; tests/test_from_loss.py has what they show."""

# Runs in the page's folder: one namespace for all its Python, one shell for each block
# of commands, in the page's order.
READER = """
import json, subprocess, sys

names = {"__name__": "__main__"}
for language, document, line, text in json.load(open(sys.argv[1])):
    print(f"--- {document}:{line}", flush=True)
    if language == "python":
        exec(compile("\\n" * (line - 1) + text, document, "exec"), names)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
"""


def read(document, folder, *, slow):
    """Does what a reader of the page does, in an empty folder."""
    for block in ALL[document]:
        if block.title is not None:
            (folder / block.title).write_text(block.text)
    program = [
        (block.language, block.document, block.line, block.text)
        for block in ALL[document]
        if block.is_run and (not block.marker or (slow and block.marker == "slow"))
    ]
    (folder / ".page.json").write_text(json.dumps(program))
    done = subprocess.run(
        [*warm.words(), "-c", READER, ".page.json"],
        cwd=folder,
        env=reader_environment(folder),
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for block in ALL[document]:
        if block.marker == "output":
            assert block.text in done.stdout, (block.where, done.stdout)


def reader_environment(folder):
    """`python`, `meshpar` and `pytest` are warm ones; all import this checkout."""
    here = os.path.dirname(sys.executable)
    first = str(warm.commands(folder / ".bin"))
    return {
        **os.environ,
        "PATH": os.pathsep.join([first, here, os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }


def pages_with(marker):
    """The documents with a program that has this marker."""
    return [
        document
        for document, found in ALL.items()
        if any(block.is_run and block.marker == marker for block in found)
    ]


@pytest.mark.parametrize(
    "document",
    [
        marks.slow(page) if page in LONG_PAGES else page
        for page in sorted({*pages_with("")} - {COMMANDS})
    ],
)
def test_every_block_of_a_page_runs(document, tmp_path):
    read(document, tmp_path, slow=False)


@pytest.mark.parametrize("slow", [False, marks.slow(True)])
def test_the_page_of_commands_has_each_and_its_output_has_the_keys(slow, tmp_path):
    read(COMMANDS, tmp_path, slow=slow)
    sections = (ROOT / COMMANDS).read_text().split("\n## meshpar ")[1:]
    assert [section.split()[0] for section in sections] == [*SUBCOMMANDS]
    for section in sections:
        output = tmp_path / f"{section.split()[0]}.json"
        if output.exists():
            check_keys(section, json.loads(output.read_text()))


def check_keys(section, found):
    """Each key of the paragraph that begins with JSON is in what was printed."""
    paragraph = section.partition("\nJSON: ")[2].partition("\n\n")[0]
    for name, inside in re.findall(r"`(\w+)`(?:\s\(([^)]*)\))?", paragraph):
        assert name in found, section.split()[0]
        value = found[name]
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict):
            assert {*re.findall(r"`(\w+)`", inside)} <= first.keys(), name


@pytest.mark.slow
@pytest.mark.parametrize("document", sorted({*pages_with("slow")} - {COMMANDS}))
def test_every_slow_block_of_a_page_runs(document, tmp_path):
    read(document, tmp_path, slow=True)


def make_docs(site, **variables):
    """Runs `make docs`, without what it installs."""
    variables = {"VENV": sys.prefix, "SITE": site, **variables}
    words = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(
        ["make", "docs", f"--assume-old={sys.prefix}/docs.installed", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path):
    done = make_docs(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "reference" / "meshpar.html").read_text()
    sentence, _, _ = meshpar.make_train_step.__doc__.partition("`")
    assert sentence.strip() in page
    assert_loads_nothing(tmp_path)
    assert_fits_and_finds(tmp_path)


def test_pages_build_without_the_reference_and_miss_only_its_names(tmp_path):
    """Most of the time of the build goes into what becomes of docstrings."""
    done = built(ROOT / "docs", tmp_path, plugins=[])
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    anchors = [re.search(r"/reference/\w+\.md#([\w.]+)'", line) for line in warnings]
    assert all(anchors), warnings
    for name in {anchor[1] for anchor in anchors}:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    assert (tmp_path / "site" / "tutorial.html").is_file(), done.stderr
    assert_loads_nothing(tmp_path / "site")


def assert_loads_nothing(site):
    """Its pages open without a network."""
    pages = [path.read_text() for path in site.rglob("*.html")]
    loads = re.compile(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)')
    assert not any(map(loads.search, pages)), "something is loaded from elsewhere"


def assert_fits_and_finds(site):
    """No page is wider than its window, and search works in pages opened from files."""
    if chromium.chromium() is None or importlib.util.find_spec("playwright") is None:
        return
    with chromium.browser() as browser:
        for path in sorted(site.rglob("*.html")):
            for width in chromium.WIDTHS:
                with chromium.opened(browser, path, width) as opened:
                    wider, faults = opened.overflow(), opened.faults
                assert (wider <= 0, faults) == (True, []), (path, width, wider)
        with chromium.opened(browser, site / "index.html", 1280) as opened:
            opened.page.fill(".md-search__input", "zigzag")
            opened.page.wait_for_selector(".md-search-result__item")


BROKEN = ("[gone](gone.md)", "[gone](index.md#gone)", "![gone](gone.png)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "status"),
    [("[there](index.md#there)", 0), *((link, 2) for link in BROKEN)],
)
def test_a_broken_link_stops_the_build(link, status, tmp_path):
    done = page_made(link, tmp_path)
    assert done.returncode == status, done.stdout + done.stderr


def test_each_broken_link_of_a_page_is_told(tmp_path):
    done = page_made("\n".join(BROKEN), tmp_path)
    assert done.returncode == 2
    for target in ("gone.md", "index.md#gone", "gone.png"):
        assert f"'{target}'" in done.stderr, done.stderr


def page_made(text, tmp_path):
    """The build of a documentation of one page."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# Title\n\n## There\n\n{text}\n")
    return built(pages, tmp_path, nav=None, hooks=[], extra_css=[])


def built(pages, tmp_path, **changed):
    """The build of a folder of pages, with settings that differ from the docs'."""
    config = tmp_path / "mkdocs.yml"
    hooks = [str(ROOT / "docs" / "mkdocs_hooks.py")]
    changed = {"docs_dir": str(pages), "hooks": hooks, **changed}
    settings = [f"{name}: {json.dumps(value)}" for name, value in changed.items()]
    config.write_text("\n".join([f"INHERIT: {ROOT / '.mkdocs.yml'}", *settings]))
    return make_docs(tmp_path / "site", DOCS=config)


def test_every_block_says_what_it_is():
    known = {*RUN, *SHOWN}
    unknown = [
        block.where
        for found in ALL.values()
        for block in found
        if block.language not in known
    ]
    assert not unknown


@pytest.mark.parametrize("document", [one for one, found in ALL.items() if found])
def test_what_a_page_imports_and_calls_exists(document):
    """Of every block, the slow ones and files too."""
    for block in ALL[document]:
        if block.language == "python":
            for module, name in named(ast.parse(block.text)):
                assert hasattr(importlib.import_module(module), name), block.where
        elif block.language == "bash":
            commands = re.findall(r"^meshpar (\w+)", block.text, re.M)
            assert {*commands} <= {*SUBCOMMANDS}, block.where


def named(tree):
    """(module, name) of what a program takes from meshpar."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module) if module.startswith("meshpar"):
                yield from ((module, one.name) for one in node.names)
            case ast.Attribute(value=ast.Name(id="meshpar"), attr=name):
                yield "meshpar", name


@pytest.mark.parametrize("package", [meshpar, meshpar.schedules, meshpar.testing])
def test_the_reference_has_every_public_name(package):
    pages = (ROOT / "docs" / "reference").glob("*.md")
    named = re.findall(r"^::: (\S+)$", "\n".join(p.read_text() for p in pages), re.M)
    assert not {*package.__all__} - {name.split(".")[-1] for name in named}


def test_blocks_that_are_not_run_are_counted():
    counts = {
        document: sum(block.marker.startswith("not run") for block in found)
        for document, found in ALL.items()
    }
    assert {name: number for name, number in counts.items() if number} == NOT_RUN


@pytest.mark.parametrize("document", sorted({*ALL} - {"CHANGELOG.md"}))
def test_files_and_tests_that_a_document_names_exist(document):
    # The changelog names what is gone, too.
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:docs|meshpar|models|recipes|tests)/[\w/.]+)`", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        if f"def {test}(" not in (ROOT / path).read_text():
            missing.append(f"{path}::{test}")
    assert not missing
