"""What draws pictures: an extra, imported by what draws alone, and not by hand."""

import ast
import json
import subprocess

import pytest

from meshpar.cli import parsing
from tests import warm
from tests.test_imports import ROOT, parse, sources

QUIET = [
    ["schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2"],
    ["estimate", "--preset", "tiny", "--layout", "data=8"],
    ["plan", "--preset", "tiny", "--devices", "2", "--global-batch", "8"],
    ["show", "--preset", "tiny", "--layout", "data=2", "--json"],
]

# Text of HTML and SVG, beside what plotly has in its labels.
TAGS = ("<svg", "<rect", "<path", "<table", "<td", "<div", "<style", "<script", "<html")

BY_HAND = (
    "meshpar/html.py",
    "meshpar/schedules/render.py",
)


def test_commands_that_draw_nothing_import_nothing_that_draws():
    program = (
        "import json, sys\n"
        "from meshpar.cli.main import main\n"
        "for words in json.loads(sys.argv[1]): assert main(words) == 0\n"
        "print(*{'matplotlib', 'plotly'} & sys.modules.keys(), file=sys.stderr)"
    )
    command = [*warm.words(), "-c", program, json.dumps(QUIET)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    "words, library",
    [
        ([*QUIET[0], "--plot", "a.svg"], "matplotlib"),
        ([*QUIET[0], "--plot", "a.html"], "plotly"),
        ([*QUIET[2], "--html", "a.html"], "plotly"),
        ([*QUIET[3], "--html", "a.html"], "plotly"),
    ],
)
def test_where_the_extra_is_absent_one_line_says_how_to_get_it(
    words, library, monkeypatch, refuses_command
):
    monkeypatch.setattr(parsing, "find_spec", lambda name: None)
    words = [word for word in words if word != "--json"]
    values = (f"'{words[-1]}'", library, "meshpar[plots]")
    refuses_command(words, "command.missing_package", *values)


def test_a_folder_is_no_file_to_write(tmp_path, refuses):
    folder = tmp_path / "folder.html"
    folder.mkdir()
    with refuses("command.file_is_folder", "--plot", "folder.html"):
        parsing.check_picture("--plot", str(folder), parsing.PAGES)


def test_asking_whether_a_file_can_be_written_leaves_no_trace(tmp_path):
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("kept")
    for path in (old, new):
        assert parsing.output_file(str(path)) == str(path)
    assert old.read_text() == "kept" and not new.exists()


def test_only_the_page_writes_tags():
    for path in {*sources("meshpar", "recipes")} - {*BY_HAND}:
        texts = {
            node.value
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not [text for text in texts for tag in TAGS if tag in text], path


def test_what_is_drawn_by_hand_is_short():
    texts = [(ROOT / path).read_text() for path in BY_HAND]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    assert len(lines) < 340  # nothing but these files
