"""The parts of the GPU benchmark on shapes that a CPU can run."""

import importlib.util
import io
import subprocess

import jax
import pytest
from rich.console import Console

from meshpar.models.presets import PRESETS, configure
from meshpar.recipes.bench.gpu import SHAPES, disagreeing, peak_flops, table
from meshpar.recipes.bench.gpu_contestants import MEASURES, Measured, Shape, bf16_agrees
from tests import warm

TINY = {
    "gpt2": Shape(
        config=configure(layers=2, hidden=32, heads=4, vocab=64, max_seq=16),
        batch=2,
        seq=16,
    ),
    "llama": Shape(config=configure("test"), batch=2, seq=16, remat="full"),
    "untied": Shape(config=configure("test", tied=False), batch=2, seq=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "untied"])
def test_every_program_computes_the_same_losses(name):
    results = {
        program: measure(TINY[name], steps=2)
        for program, measure in MEASURES.items()
        if program != "torch.compile" or importlib.util.find_spec("torch")
    }
    assert disagreeing({name: results}) == []
    assert all(measured.step_s > 0 for measured in results.values())
    assert results["meshpar"].losses[2] < results["meshpar"].losses[0]
    assert results["meshpar"].compiled_bytes > 0


def test_model_flops_are_those_of_the_matmuls():
    # 2 layers of 12 h^2 and a tied head of 64 h; 12 layers h s for scores.
    shape, h = TINY["gpt2"], 32
    per_token = 6 * (2 * 12 * h * h + 64 * h) + 12 * 2 * h * 16
    assert shape.step_flops == 2 * 16 * per_token


def test_the_shapes_are_the_models_that_they_are_called():
    sizes = {name: shape.model.num_parameters for name, shape in SHAPES.items()}
    assert sizes["gpt2"] == pytest.approx(124e6, rel=0.01)
    assert sizes["llama-1.2b"] == pytest.approx(1.24e9, rel=0.01)
    assert SHAPES["gpt2"].config == PRESETS["gpt2"]


def test_a_program_with_other_losses_is_named():
    same, other = (Measured(losses=[4.0 + d], step_s=1.0) for d in (0.01, 0.5))
    ours = Measured(losses=[4.0], step_s=1.0)
    found = disagreeing({"gpt2": {"meshpar": ours, "plain": same, "wrong": other}})
    assert [line.split(" has")[0] for line in found] == ["gpt2: wrong"]
    assert bf16_agrees([4.0], [4.01]) and not bf16_agrees([4.0], [4.5])
    # A fresh model starts at ln V, whatever it computes; what it learns tells.
    losses = [10.82, 10.41, 9.98]
    assert bf16_agrees(losses, [10.83, 10.42, 9.99])
    assert not bf16_agrees(losses, [10.82, 10.80, 10.79])
    assert not bf16_agrees(losses, [10.82, 9.9, 9.0])


def test_the_table_has_speed_share_of_the_peak_and_ratio():
    shape = TINY["gpt2"]
    results = {
        "gpt2": {
            "meshpar": Measured(losses=[4.0], step_s=0.5, peak_bytes=2_500_000_000),
            "plain": Measured(losses=[4.0], step_s=0.6),
        }
    }
    console = Console(file=io.StringIO(), width=160)
    console.print(table({"gpt2": shape}, results, peak=shape.step_flops * 4))
    text = console.file.getvalue()
    assert "500.00" in text and "64" in text and "50.0%" in text and "1.200" in text
    assert "2.500" in text


def test_the_peak_is_found_by_the_name_of_the_gpu():
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GB200") == 2.5e15
    for other in ("NVIDIA GeForce RTX 3090", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):
        assert peak_flops(other) is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_it_says_in_one_line_that_there_is_no_gpu():
    words = [*warm.words(), "-m", "recipes.bench.gpu"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert ended.stderr.strip().startswith("recipes.bench.gpu: JAX sees no GPU here")
    assert len(ended.stderr.strip().splitlines()) == 1
