"""`meshpar show`: the facts of one layout, and what it refuses."""

import json
import subprocess

import pytest

from meshpar import Layout, lint
from meshpar.cli.main import main
from meshpar.cli.report.bars import memory_parts
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.memory import rank_memories
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import SHAPES
from tests import warm
from tests.refusals import check_words, ended

LINE = "fsdp=2,stage=4,tensor=8,microbatches=16,remat=full,precision=bf16"
LARGE = ["--layout", LINE, "--model", "llama3-70b", "--global-batch", "128"]
SMALL = ["show", "--layout", "data=2,tensor=2", "--preset", "tiny"]


def facts_of(capsys, *words):
    assert main(["show", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


@pytest.fixture(scope="module")
def facts():
    """Of a model that no device here could hold."""
    command = [*warm.words(), "-m", "meshpar", "show", *LARGE, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_parameters_are_those_of_the_lint_and_each_device_has_its_shard(facts):
    rows = lint(build("llama3-70b"), LINE).parameters
    for found, row in zip(facts["parameters"], rows, strict=True):
        assert found["path"] == row.path
        assert found["local_shape"] == list(row.local_shape)
        assert found["bytes"] == row.bytes
        holders = found["shard_of_device"]
        assert len(holders) == 64
        for shard in range(found["shards"]):
            assert holders.count(shard) == found["copies"]


def test_machine_and_links_are_those_of_the_cluster(facts):
    assert facts["machine"]["hosts"] == facts["machine"]["devices_per_host"] == 8
    links = {tuple(one["mesh_axes"]): one["link"] for one in facts["mesh_axes"]}
    assert links == {("fsdp",): "network", ("stage",): "network", ("tensor",): "host"}


def test_traffic_and_memory_are_those_of_the_estimate(facts, capsys):
    assert main(["estimate", *LARGE, "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    assert {key: facts[key] for key in estimated} == estimated
    assert sum(one["wire_bytes"] for one in facts["mesh_axes"]) == pytest.approx(
        sum(one["wire_bytes"] for one in estimated["collectives"])
    )
    totals = [rank["total_bytes"] for rank in facts["ranks"]]
    assert len(totals) == 4 and max(totals) == estimated["memory"]["total_bytes"]


def test_the_timeline_is_the_step_without_what_it_does_once(facts):
    timeline, time = facts["timeline"], facts["time"]
    assert (timeline["schedule"], timeline["stages"]) == ("1f1b", 4)
    assert [len(events) for events in timeline["events"]] == [32] * 4
    names = [phase["name"] for phase in timeline["phases"]]
    assert names == ["warm-up", "steady", "cool-down"]
    step_s = facts["step_s"] - time["optimizer_s"] - time["straggler_s"]
    once_s = time["exposed"]["fsdp"]
    assert timeline["span_s"] == pytest.approx(step_s - once_s, rel=0.02)


def test_a_long_timeline_is_drawn_with_fewer_microbatches(capsys):
    line = "stage=8,microbatches=4096,remat=full"
    found = facts_of(capsys, "--layout", line, "--preset", "llama3-8b")["timeline"]
    assert found["microbatches"] % 8 == 0
    assert 100 < 2 * 8 * found["microbatches"] <= 4000


@pytest.mark.parametrize(
    "line",
    [
        "data=8",
        "fsdp=8",
        "fsdp=8,optimizer_memory=host",
        "fsdp=2,stage=4,microbatches=8,remat=full,precision=bf16",
        "data=8,zero=1,precision=bf16",
        "tensor=8,remat=full",
        "data=8,zero=2,microbatches=2,precision=bf16,param_dtype=bf16",
    ],
)
@pytest.mark.parametrize("model", ["tiny-8", "llama2-7b", "22b"])
def test_kinds_of_memory_add_up_to_the_whole(model, line):
    layout, cluster = Layout.parse(line), cluster_of("h100-80gb", devices=8)
    run = estimate(SHAPES[model], cluster, layout, global_batch=64, seq=256).run
    for memory in rank_memories(run):
        parts = memory_parts(memory)
        assert sum(parts.values()) == pytest.approx(memory.total_bytes, rel=1e-9)


@pytest.mark.parametrize(
    "more, refusal",
    [
        (
            ["--html", "no/such/page.html"],
            ("command.no_folder", "--html", "'no/such'"),
        ),
        (["--html", "page.png"], ("command.unknown_suffix", "page.png", ".html")),
        (
            ["--layout", "data=2,expert=2"],
            ("layout.expert_without_experts", "expert=2", "tiny"),
        ),
        (["--layout", "data=2,tensr=2"], ("layout.unknown_key", "'tensr'", "'tensor'")),
        (["--preset", "megatron-3.6b"], ("model.unknown_preset", "megatron-3.6b")),
        (["--devices", "16"], ("layout.wrong_device_count", 4, 16)),
    ],
)
def test_bad_input_ends_with_2_and_one_line(
    more, refusal, refuses_command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    refuses_command([*SMALL, "--html", "page.html", *more], *refusal)


def test_neither_a_page_nor_facts_ends_with_2_and_one_line(capsys, snapshot):
    assert ended(SMALL) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.out == ""
    values = ("--html", "--json")
    check_words(captured.err.rstrip(), "command.no_output", values, snapshot)


def test_a_page_is_written_and_named(capsys, tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "page.html"
    assert main([*SMALL, "--html", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: tiny on 4 x h100-80gb on 1 host\n"
    text = path.read_text()
    facts = facts_of(capsys, *SMALL[1:])
    head = text[text.index("<h1>") : text.index("<h2>")]
    assert f"MFU {facts['mfu']:.1%}" in head and "<p>step " in head
    for axis in ("data", "tensor"):
        assert f'"place along {axis}"' in text  # the legend of the device grid
    for heading in ("Machine", "Who holds what", "What each mesh axis sends"):
        assert f"<h2>{heading}</h2>" in text
    for row in facts["parameters"]:
        first = f'<td data-head="parameter">{row["path"]}</td>'
        cells = text.partition(first)[2].partition("</tr>")[0]
        assert f">{row['shards']} x {row['copies']}</td>" in cells
