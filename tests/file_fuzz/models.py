"""Files of a model: config.json, safetensors, GGUF, tokenizers and chat templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from meshpar.data.tokenizer import FileTokenizer, whole_texts_tokenizer
from meshpar.errors import InputError
from meshpar.models.convert.chat_template import read_template
from meshpar.planner.workload.shapes import workload_of
from meshpar.recipes.loaded import load
from tests.bpe import write_bpe
from tests.chat_cases import MESSAGES, TEMPLATES, TOOLS
from tests.file_fuzz.gguf_bytes import document_of, gguf_bytes
from tests.file_fuzz.kind import Kind, change_json, change_one_of
from tests.file_fuzz.mutations import Random, changed_bytes, changed_values
from tests.transformers_cases import CONFIGS, write_model

WORDS = "To be, or not to be: that is the question"
CHAT = (
    "{{ bos_token }}{% for one in messages %}{{ '<|' + one.role + '|>' }}\n"
    "{%- if loop.last and one.content is string %} {{ one.content | trim }}"
    "{% else %} {{ one['content'] }}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TOKENIZER_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "bos_token": {"content": "<|endoftext|>", "special": True},
    "eos_token": "<|endoftext|>",
    "chat_template": CHAT,
    "extra_special_tokens": {"image_token": "<img>"},
    "model_max_length": 1000000000000000019884624838656,
}


def read_model(folder: Path) -> str:
    """Read a model as `meshpar generate` does, some of its arrays with it."""
    loaded = load(folder)
    tokens = loaded.tokenizer.encode("To be")
    tokens = getattr(tokens, "ids", tokens)
    return f"{loaded.config} {tokens} {loaded.stop_tokens} {sums_of(loaded.params)}"


def sums_of(params: Any) -> list[float]:
    """Read some arrays of a tree of what can be read in parts."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: not isinstance(node, dict))
    return [float(leaf[...].astype("float32").sum()) for leaf in leaves[:8]]


def _model(folder: Path, family: str) -> Path:
    write_model(folder, family)
    write_bpe(folder / "tokenizer.json", [WORDS], vocab=260)
    for name, said in {
        "tokenizer_config.json": _TOKENIZER_CONFIG,
        "generation_config.json": {"eos_token_id": [0, 1], "do_sample": True},
    }.items():
        (folder / name).write_text(json.dumps(said))
    return folder


def _all_families(above: Path) -> Iterator[Path]:
    for family in CONFIGS:
        yield _model(above / family, family)


def _change_config(random: Random, folder: Path) -> None:
    is_other = random.random() < 0.15
    change_json(
        random, folder / ("generation_config.json" if is_other else "config.json")
    )


def _read_config(folder: Path) -> str:
    """Read a config as the planner does, and, whether or not it takes it, the model."""
    try:
        told = f"{workload_of(str(folder / 'config.json'))}"
    except InputError as error:
        told = str(error)
    return f"{told} {read_model(folder)}"


def _sharded(above: Path) -> Iterator[Path]:
    from safetensors.numpy import load_file, save_file

    folder = _model(above / "sharded", "llama")
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    files = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file)
        files |= dict.fromkeys(half, file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    yield folder


def _change_index(random: Random, folder: Path) -> None:
    change_json(random, folder / "model.safetensors.index.json")


def _change_safetensors(random: Random, folder: Path) -> None:
    """Change the header, its length and what follows, or bytes of it."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, values = content[8 : 8 + size], content[8 + size :]
    kind = random.random()
    if kind < 0.3:
        file.write_bytes(changed_bytes(random, content[: 8 + size]) + values)
        return
    if kind < 0.4:  # Other numbers, which nothing tells from the right ones.
        file.write_bytes(content[: 8 + size] + random.bytes(len(values)))
        return
    changed = json.dumps(changed_values(random, json.loads(header))).encode()
    changed += b" " * (-len(changed) % 8)
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + values)


def _gguf_files(above: Path) -> Iterator[Path]:
    from safetensors.numpy import load_file

    from tests.test_convert_gguf import SAID, write_gguf

    gemma = {"block_count": 6, "attention__key_length": 8}
    for family, more in (
        ("smollm2", {}),
        ("gemma3", gemma | {"attention__sliding_window": 4, "rope__freq_base": 1e6}),
    ):
        source = write_model(above / f"of_{family}", family)
        folder = above / family
        folder.mkdir()
        kind = "gemma3" if family == "gemma3" else "llama"
        tensors = load_file(source / "model.safetensors")
        if family == "gemma3":  # Each sixth layer of a file sees all tokens.
            last = {name for name in tensors if "layers.0." in name}
            tensors |= {
                name.replace("layers.0.", "layers.5."): tensors[name] for name in last
            }
        write_gguf(folder / "plain.gguf", kind, tensors, **{**SAID, **more})
        document = document_of(folder / "plain.gguf")
        document["values"] |= _tokenizer_values(above)
        (folder / "document.json").write_text(json.dumps(document))
        (folder / "model.gguf").write_bytes(gguf_bytes(document))
        (folder / "plain.gguf").unlink()
        yield folder


def _tokenizer_values(above: Path) -> dict[str, Any]:
    path = write_bpe(above / "tokenizer.json", [WORDS], vocab=260)
    said = json.loads(path.read_text())["model"]
    tokens = sorted(said["vocab"], key=said["vocab"].__getitem__)
    merges = [
        " ".join(pair) if isinstance(pair, list) else pair for pair in said["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.chat_template": CHAT,
    }


def _change_gguf(random: Random, folder: Path) -> None:
    file = folder / "model.gguf"
    document = json.loads((folder / "document.json").read_text())
    (folder / "document.json").unlink()
    if random.random() < 0.4:
        size = len(gguf_bytes({**document, "data_bytes": 0}))
        content = file.read_bytes()
        file.write_bytes(changed_bytes(random, content[:size]) + content[size:])
        return
    part = ("values", "values", "tensors")[random.integers(3)]
    document[part] = changed_values(random, document[part])
    file.write_bytes(gguf_bytes(document))


def _read_gguf(folder: Path) -> str:
    template = read_template(folder / "model.gguf")
    return f"{read_model(folder / 'model.gguf')} {template.render(MESSAGES)}"


def _one_model(above: Path) -> Iterator[Path]:
    yield _model(above / "model", "smollm2")


def _tokenizers(above: Path) -> Iterator[Path]:
    from tests.chat_cases import write_folder

    for name in ("bytes", "words"):
        folder = above / name
        folder.mkdir(parents=True)
        if name == "bytes":
            write_bpe(folder / "tokenizer.json", [WORDS], vocab=280)
        else:
            write_folder(folder, {"tokenizer_config.json": {"eos_token": "</s>"}})
        yield folder


def _read_tokenizer(folder: Path) -> str:
    file = folder / "tokenizer.json"
    tokenizer = FileTokenizer(file)
    tokens = tokenizer.encode([WORDS, "", "é日\n\0", "a" * 1000])
    told = tokenizer.decode(tokens[0].tolist())
    whole = whole_texts_tokenizer(file).encode("To be").ids
    return f"{told} {tokens} {whole} {tokenizer.vocab} {tokenizer.eos_text}"


def _chats(above: Path) -> Iterator[Path]:
    folder = _model(above / "model", "smollm2")
    (folder / "model.safetensors").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    yield folder
    plain = [text for text, more in TEMPLATES.values() if not more]
    for number, text in enumerate(plain):
        other = shutil.copytree(folder, above / f"template{number}")
        (other / "chat_template.jinja").write_text(text)
        if _is_read(other):
            yield other


def _is_read(folder: Path) -> bool:
    try:
        return bool(_read_chat(folder))
    except InputError:
        return False


def _change_template(random: Random, folder: Path) -> None:
    file = folder / "chat_template.jinja"
    if not file.exists():
        file.write_text(CHAT)
    file.write_bytes(changed_bytes(random, file.read_bytes()))


def _change_tokenizer_config(random: Random, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change_one_of(random, folder, ("tokenizer_config.json", "special_tokens_map.json"))


def _read_chat(folder: Path) -> str:
    template = read_template(folder)
    told = template.render(MESSAGES) + template.render(MESSAGES, tools=TOOLS)
    return f"{told} {FileTokenizer(folder / 'tokenizer.json').eos_text}"


def _first(examples: Any) -> Any:
    def made(above: Path) -> Iterable[Path]:
        return [next(iter(examples(above)))]

    return made


KINDS = {
    "config": Kind(
        num=420, examples=_all_families, change=_change_config, read=_read_config
    ),
    "index": Kind(num=100, examples=_sharded, change=_change_index, read=read_model),
    "safetensors": Kind(
        num=150, examples=_all_families, change=_change_safetensors, read=read_model
    ),
    "gguf": Kind(num=220, examples=_gguf_files, change=_change_gguf, read=_read_gguf),
    "tokenizer": Kind(
        num=130,
        examples=_tokenizers,
        change=lambda random, folder: change_json(random, folder / "tokenizer.json"),
        read=_read_tokenizer,
    ),
    "tokenizer_config": Kind(
        num=110,
        examples=_first(_chats),
        change=_change_tokenizer_config,
        read=_read_chat,
    ),
    "chat_template": Kind(
        num=120, examples=_chats, change=_change_template, read=_read_chat
    ),
}
"""Name -> a kind of file of a model."""
