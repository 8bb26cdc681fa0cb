"""The command that a plan prints builds the model that was planned."""

import shlex

import pytest

from meshpar.cli.main import main
from meshpar.planner.machine.clusters import cluster_of, load_device
from meshpar.recipes.model import build_model, model_sizes
from meshpar.recipes.options import parse_arguments

PLAN = "plan --hardware h100-80gb --devices 4 --global-batch 64"
DENSE = "layers=4,hidden=256,heads=8,vocab=256"


def printed_command(capsys, words: str) -> str:
    assert main([*PLAN.split(), *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("run it: "))


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (f"--model {DENSE}", {"max_seq": 2048}),
        (f"--model {DENSE} --seq 512", {"max_seq": 1024}),
        (f"--model {DENSE},experts=8,top_k=2", {"experts": 8, "expert_ffn": 1024}),
        (
            f"--model {DENSE},learned_positions=true,layer_norm=true,biases=true,"
            "tied=true",
            {"embed": 256, "max_seq": 2048},
        ),
        (f"--model {DENSE},gated=true,tied=true", {"ffn": 1024, "tied": True}),
        ("--preset tiny --model layers=6 --seq 4096", {"layers": 6}),
    ],
)
def test_the_command_that_is_printed_builds_its_model(capsys, words, sizes):
    command = printed_command(capsys, words).removeprefix("run it: ")
    config = parse_arguments(shlex.split(command)[2:], "meshpar train")
    build_model(config)
    built = model_sizes(config)
    assert {name: built[name] for name in sizes} == sizes
    assert config.seq <= (built["max_seq"] or config.seq)


def test_words_of_no_model_are_told_and_no_command_is_printed(capsys):
    line = printed_command(capsys, f"--model {DENSE},biases=true")
    assert line.startswith("run it: not yet; biases")


def test_a_device_of_a_file_has_the_files_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "h100-80gb"\nmemory_bytes = 64e9\n')
    assert load_device(path).name == "mine"
    path.write_text('name = "other"\nlike = "h100-80gb"\n')
    assert load_device(path).name == "other"


def test_hosts_that_nobody_gave_divide_the_devices():
    cluster = cluster_of("gb200", devices=4096)
    assert cluster.num_devices == 4096
    assert (cluster.hosts, cluster.devices_per_host) == (64, 64)
