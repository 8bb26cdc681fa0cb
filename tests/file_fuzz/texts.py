"""Texts and conversations to train on, and machines to plan for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from meshpar.cli.main import main
from meshpar.data.documents import jsonl_documents
from meshpar.errors import InputError, Skipped
from meshpar.foreign_files import parse_toml
from meshpar.models.convert.chat_template import ChatTemplate
from meshpar.recipes.conversations import (
    ConversationRows,
    check_answers,
    read_conversations,
)
from tests.file_fuzz.cases import captured
from tests.file_fuzz.kind import Kind, change_lines
from tests.file_fuzz.models import CHAT, WORDS
from tests.file_fuzz.mutations import Random, changed_bytes, changed_toml


def _texts(above: Path) -> Iterator[Path]:
    above.mkdir(parents=True)
    rows = [{"text": f"{WORDS} {at}", "source": {"id": at}} for at in range(6)]
    _write_lines(above / "a.jsonl", rows)
    yield above


def _write_lines(file: Path, rows: list) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _change_texts(random: Random, folder: Path) -> None:
    import gzip

    change_lines(random, folder / "a.jsonl")
    content = (folder / "a.jsonl").read_bytes()
    packed = gzip.compress(content, mtime=0)
    if random.random() < 0.5:
        packed = changed_bytes(random, packed)
    (folder / "a.jsonl.gz").write_bytes(packed)


def _read_texts(folder: Path) -> str:
    found = []
    for name in ("a.jsonl.gz", "a.jsonl"):
        try:
            skipped = Skipped(policy="skip")
            found = [*jsonl_documents(folder / name, "text", skipped)]
        except InputError:
            if name == "a.jsonl":
                raise
    return " ".join([*found, *jsonl_documents(folder / "a.jsonl", "text", Skipped())])


def _chats(above: Path) -> Iterator[Path]:
    above.mkdir(parents=True)
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"{at} + {at}?"},
                {"role": "assistant", "content": f"{2 * at}."},
            ],
            "id": at,
        }
        for at in range(5)
    ]
    _write_lines(above / "a.jsonl", rows)
    yield above


def _read_chats(folder: Path) -> str:
    template = ChatTemplate(CHAT, {"eos_token": "</s>"})
    chats = read_conversations(folder / "a.jsonl")
    rows = ConversationRows(chats, template, lambda text: list(text.encode()), 64)
    told = check_answers(rows, "to train on")
    return told + "".join(str(rows[at]) for at in range(len(rows)))


_H100 = (
    'name = "mine"\nlike = "h100-80gb"\nmemory_bytes = 64e9\n'
    "link_bytes_per_s = 3.0e11\nnetwork_bytes_per_s = 4e10\ndomain_devices = 8\n"
    "[efficiency]\nmatmul = 0.7\nlink = 0.6\n[peak_flops]\nbf16 = 9e14\n"
)
_EXECUTION = 'like = "megatron-core"\ntensor_ring = false\ngradient_bytes = 2\n'


def _machines(above: Path) -> Iterator[Path]:
    from meshpar.hardware.devices import DEVICES

    above.mkdir(parents=True)
    alone = {**vars(DEVICES["h100-80gb"])}
    achieved = vars(alone.pop("efficiency"))
    peaks = alone.pop("peak_flops")
    whole = "\n".join(
        (
            _toml({key: value for key, value in alone.items() if value is not None}),
            f"[efficiency]\n{_toml(achieved)}",
            f"[peak_flops]\n{_toml(peaks)}",
        )
    )
    for name, text in (("liked", _H100), ("whole", whole)):
        folder = above / name
        folder.mkdir()
        (folder / "mine.toml").write_text(text)
        (folder / "program.toml").write_text(_EXECUTION)
        yield folder


def _toml(values: dict) -> str:
    from tests.file_fuzz.mutations import toml_of

    return "\n".join(f"{key} = {toml_of(value)}" for key, value in values.items())


def _change_machine(random: Random, folder: Path) -> None:
    file = folder / ("program.toml" if random.random() < 0.25 else "mine.toml")
    text = file.read_text()
    if random.random() < 0.3:
        file.write_bytes(changed_bytes(random, text.encode()))
    else:
        file.write_bytes(changed_toml(random, text, parse_toml))


def _read_machine(folder: Path) -> str:
    """Estimate and plan on the machine."""
    options = ["--preset", "llama3-8b", "--hardware", "mine.toml", "--seq", "2048"]
    options += ["--execution", "program.toml"]
    told = ""
    for words in (
        ["estimate", "--layout", "fsdp=8,tensor=2", *options],
        ["plan", "--devices", "8", "--global-batch", "8", *options[:-2]],
    ):
        with captured() as (out, err):
            status = main(words)
        if status not in (0, 1, 2) or (status == 2 and err.getvalue().count("\n") != 1):
            raise AssertionError(f"{words} ends with {status}: {err.getvalue()}")
        if status == 2:
            raise InputError(err.getvalue())
        told += out.getvalue()
    return told


KINDS = {
    "texts": Kind(num=130, examples=_texts, change=_change_texts, read=_read_texts),
    "conversations": Kind(
        num=130,
        examples=_chats,
        change=lambda random, folder: change_lines(random, folder / "a.jsonl"),
        read=_read_chats,
    ),
    "hardware": Kind(
        num=140, examples=_machines, change=_change_machine, read=_read_machine
    ),
}
"""Name -> a kind of file."""
