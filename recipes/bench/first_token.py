"""Time of a whole process that generates one token: ours and transformers'.

    python -m recipes.bench.first_token
    python -m recipes.bench.first_token --python OTHER/bin/python

A model of SmolLM2-135M's sizes with random weights is written as safetensors (fp32) and
as GGUF (fp16), with a tokenizer of as many pairs of letters. Then `meshpar generate`
and transformers read each and generate one token, in turns, each in a process of its
own. transformers, torch and gguf may be another interpreter's. The first run of each
warms the files' cache and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar.models.convert.assembled import fitted
from meshpar.models.convert.families import conversion_table
from meshpar.models.convert.tables.gguf import gguf_table
from meshpar.models.convert.writing import write_weights
from meshpar.models.presets import PRESETS, build
from meshpar.recipes.bench.conditions import conditions, turn_ynn_off

_PROMPT = "to be or not to be, that is the question"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THEIRS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, prompt = sys.argv[1:]
file = {"gguf_file": "model.gguf"} if path.endswith(".gguf") else {}
folder = path.removesuffix("/model.gguf")
tokenizer = AutoTokenizer.from_pretrained(folder, **file)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
tokens = torch.tensor([tokenizer.encode(prompt)])
found = model.generate(tokens, max_new_tokens=1, do_sample=False)
print([found[0, -1].item()])
"""


def main() -> None:
    """Measures every way and prints one table."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(1)
    with tempfile.TemporaryDirectory() as folder:
        files = _written(Path(folder), args.preset)
        ways = {}
        for kind, path in files.items():
            ours = [sys.executable, "-m", "meshpar", "generate", "--json"]
            ours += ["--from", str(path), "--max-tokens", "1", "--prompt", _PROMPT]
            ways[f"meshpar, {kind}"] = ours
            theirs = [args.python, "-c", _THEIRS, str(path), _PROMPT]
            ways[f"transformers, {kind}"] = theirs
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        tokens = {}
        for run in range(args.runs + 1):
            for way, command in ways.items():
                wall_s, cpu_s, tokens[way] = _timed(command)
                if run:
                    times[way].append((wall_s, cpu_s))
    if len(set(map(str, tokens.values()))) > 1:
        raise SystemExit(f"they choose other tokens: {tokens}")
    sizes = {"prompt": len(_PROMPT), "tokens": 1}
    print(conditions("recipes.bench.first_token", 1, sizes, f"{args.runs} runs"))
    table = Table("way", "s, median", "least", "CPU s, median")
    for way, runs in times.items():
        walls, cpus = zip(*runs, strict=True)
        middle, cpu = statistics.median(walls), statistics.median(cpus)
        table.add_row(way, f"{middle:.2f}", f"{min(walls):.2f}", f"{cpu:.2f}")
    Console().print(table)


def _timed(command: list[str]) -> tuple[float, float, list[int]]:
    """Run a command; return its seconds, its CPU seconds and its token."""
    before, start = _children_cpu_s(), time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": ""}
    )
    wall_s = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{command[:4]} failed:\n{done.stderr[-2000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    tokens = said[0]["tokens"] if isinstance(said[0], dict) else said
    return wall_s, _children_cpu_s() - before, tokens


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _written(folder: Path, preset: str) -> dict[str, Path]:
    """Write the model's two files, and their tokenizer."""
    config, model = PRESETS[preset], build(preset)
    params = jax.tree.map(
        # What fp16 holds, so that both files have the same values.
        lambda x: np.asarray(x).astype(np.float16).astype(np.float32),
        jax.jit(model.init)(0),
    )
    tokens, pairs = _vocabulary(config.vocab)
    _write_tokenizer(folder, tokens, pairs)
    write_weights(folder, config, params)
    apart = folder / "gguf"
    apart.mkdir()
    _write_gguf(apart / "model.gguf", config, model, params, (tokens, pairs))
    return {"safetensors": folder, "GGUF": apart / "model.gguf"}


def _vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return special tokens, all bytes and pairs of them; and the pairs."""
    from tokenizers import pre_tokenizers

    first = "Ġetaoinshrdlucmfwypvbgkjxqz"
    letters = [*first, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(first))]
    pairs = [(one, two) for one in letters for two in letters if two != first[0]]
    pairs = pairs[: size - len(_SPECIAL) - len(letters)]
    return [*_SPECIAL, *letters, *(one + two for one, two in pairs)], pairs


def _write_tokenizer(
    folder: Path, tokens: list[str], pairs: list[tuple[str, str]]
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIAL[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def _write_gguf(path: Path, config: Any, model: Any, params: Any, of_text: Any) -> None:
    import gguf

    (tokens, pairs), writer = of_text, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(config.embed)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.size_per_head)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if one in _SPECIAL else 1 for one in tokens])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_eos_token_id(tokens.index(_SPECIAL[-1]))
    for name, values in _gguf_tensors(config, model, params):
        is_matrix = values.ndim > 1
        writer.add_tensor(name, values.astype(np.float16) if is_matrix else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(
    config: Any, model: Any, params: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a GGUF file by name."""
    known = model.flat_parameters()
    table = fitted(gguf_table(config, conversion_table(config)), model)
    for keys, array in jax.tree.leaves_with_path(params):
        path = ".".join(key.key for key in keys)
        layers = array if known[path].num_layers is not None else [array]
        for at, ours in enumerate(layers):
            for row in table[path]:
                yield from row.write(ours, at)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the interpreter that has transformers (this one)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
