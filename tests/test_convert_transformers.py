"""Logits beside Transformers on the same tensors, in full; needs torch.

    pip install 'meshpar[convert-test]'

`MESHPAR_SMOLLM2` and `MESHPAR_GEMMA3` name GGUF files of SmolLM2-135M and of Gemma 3
270M, for the tests on real weights (docs/guides/weights.md says where they come from).
"""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest

from meshpar.models.convert.gguf_file import GGUFFile
from meshpar.models.convert.gguf_tokenizer import gguf_tokenizer
from meshpar.models.convert.stored_config import config_from_sizes
from meshpar.models.convert.weights import read_weights
from meshpar.models.convert.writing import write_weights
from tests.transformers_cases import CONFIGS, inputs_of, logits_on, write_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROW = np.array([[504, 3575, 282, 4649, 314, 7042, 30, 198]], np.int32)
LAYOUTS = ("data=1", "tensor=2", "data=2,stage=2,microbatches=1", "fsdp=2")


@pytest.mark.parametrize("family", CONFIGS)
def test_every_layout_has_their_logits_and_so_has_what_is_written(family, tmp_path):
    from tests.make_transformers_logits import logits_of

    folder = write_model(tmp_path / "theirs", family)
    wanted = logits_of(folder, family)
    for layout in LAYOUTS:
        weights = read_weights(folder)
        found, step, state = logits_on(weights, layout, inputs_of(family))
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0, err_msg=layout)
    params = step.in_layer_order(jax.tree.map(np.asarray, state.params))
    again = tmp_path / "again"
    write_weights(again, weights.config, params, weights.model_state)
    np.testing.assert_array_equal(logits_of(again, family), wanted)
    assert config_from_sizes(asdict(weights.config)) == weights.config


def test_a_run_starts_from_weights_and_is_exported(tmp_path, capsys):
    import json

    import transformers

    from meshpar.cli.main import main

    folder = write_model(tmp_path / "theirs", "qwen3")
    said = json.loads((folder / "config.json").read_text())
    made = transformers.AutoConfig.for_model(**{**said, "vocab_size": 256})
    model = transformers.AutoModelForCausalLM.from_config(made)
    model.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 40)
    words = ["train", "--from", str(folder), "--out", str(tmp_path / "run")]
    words += ["--layout", "data=2,stage=2,tensor=2,microbatches=2", "--text", str(text)]
    words += ["--steps", "1", "--seq", "16", "--global-batch", "8"]
    words += ["--sample-tokens", "1", "--bubble-rounds", "0"]
    assert main(words) == 0
    assert "bytes read by this process" in capsys.readouterr().out
    to = tmp_path / "again"
    assert main(["export", str(tmp_path / "run"), "--to", str(to)]) == 0
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        to, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # One step of Adam moves every value by at most its rate, and weight decay.
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(float((one - other).abs().max()) < 0.01 for one, other in pairs)


def real(variable):
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no GGUF file")
    return Path(path)


@pytest.mark.parametrize("layout", ["data=1", "data=2,tensor=2", "stage=2"])
def test_smollm2_says_paris(layout):
    path = real("MESHPAR_SMOLLM2")
    tokenizer = gguf_tokenizer(GGUFFile(path))
    tokens = tokenizer.encode("The capital of France is").ids
    if "stage" in layout:
        layout += ",microbatches=1"
    rows = np.zeros((2, 8), np.int32)
    rows[:, : len(tokens)] = tokens
    logits, _, _ = logits_on(read_weights(path), layout, {"tokens": rows})
    following = int(logits[0, len(tokens) - 1].argmax())
    assert tokenizer.decode([following]) == " Paris"


@pytest.mark.parametrize("variable", ["MESHPAR_SMOLLM2", "MESHPAR_GEMMA3"])
def test_real_weights_have_the_logits_of_transformers(variable, tmp_path):
    weights = read_weights(real(variable))
    found, _, _ = logits_on(weights, "data=1", {"tokens": ROW})
    wanted = their_logits(weights, ROW, "float32", tmp_path)
    # SmolLM2's first token has a massive activation (Sun et al. 2024): from layer 12 to
    # 28 one channel of the residual stream is 22,500, where fp32's steps are 0.002. So
    # any order of a sum shows in its logits. Gemma's logits are up to 36 large, of
    # which 1.1e-4 is 29 steps of fp32. The next test is without either's rounding.
    np.testing.assert_allclose(found[:, 1:], wanted[:, 1:], atol=1e-4, rtol=1e-6)
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], atol=3e-4, rtol=0)


@pytest.mark.parametrize("variable", ["MESHPAR_SMOLLM2", "MESHPAR_GEMMA3"])
def test_real_weights_have_their_logits_on_every_layout_in_fp64(variable, tmp_path):
    path, rng = real(variable), np.random.default_rng(3)
    rows = np.concatenate([ROW, rng.integers(5, 40_000, (3, 8), dtype=np.int32)])
    np.save(tmp_path / "rows.npy", rows)
    program = [sys.executable, "-m", "tests.logits_in_fp64", path]
    files = [tmp_path / "rows.npy", tmp_path / "found.npz"]
    subprocess.run([*program, *files, *LAYOUTS], check=True)
    wanted = their_logits(read_weights(path), rows, "float64", tmp_path)
    # Transformers computes norms, the softmax and rotations in fp32 in any case.
    for layout, found in zip(
        LAYOUTS, np.load(tmp_path / "found.npz")["logits"], strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0, err_msg=layout)


def their_logits(weights, rows, dtype, tmp_path):
    """Of Transformers in `dtype`, from the tensors that we write."""
    import torch
    import transformers

    write_weights(tmp_path / "theirs", weights.config, weights.params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs",
        attn_implementation="eager",
        dtype=getattr(torch, dtype),
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(rows).long()).logits.numpy()
