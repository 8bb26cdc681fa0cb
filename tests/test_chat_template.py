"""Chat templates render as Transformers renders them, and say whose fault it is."""

import json
from collections import deque
from datetime import date, datetime
from enum import Enum

import numpy as np
import pytest

from meshpar import InputError
from meshpar.models.convert.chat_template import (
    ChatTemplate,
    read_template,
    render_chat,
)
from meshpar.models.convert.run_files import copy_tokenizer
from tests.chat_cases import FOLDERS, MESSAGES, STORED, TEMPLATES, TOOLS, write_folder

pytest.importorskip("jinja2")
THEIRS = json.loads(STORED.read_text(encoding="utf-8"))
DAY = "{{ strftime_now('%d %b %Y') }}"
TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "image_token": "<img>",
    "audio_token": "<aud>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_makes_the_text_that_transformers_makes(name):
    template, given = TEMPLATES[name]
    given = {"chat": MESSAGES, **given}
    chat = given.pop("chat")
    if THEIRS[name] is None:
        with pytest.raises(InputError):
            render_chat(template, chat, **given, **TOKENS)
    else:
        assert render_chat(template, chat, **given, **TOKENS) == THEIRS[name]


# Of two of them theirs takes the other template with tools, which no recipe here has.
REFUSED_FOLDERS = {
    "none": ("data.no_chat_template",),
    "a list without a default": ("data.no_default_chat_template", "tool_use"),
    "a file for tools alone": ("data.no_default_chat_template", "tool_use"),
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_folders_template_and_tokens_are_those_of_transformers(
    name, tools, tmp_path, refuses
):
    folder = write_folder(tmp_path, FOLDERS[name])
    if name in REFUSED_FOLDERS:
        with refuses(*REFUSED_FOLDERS[name]):
            read_template(folder)
        return
    found = read_template(folder).render(MESSAGES, tools=tools)
    assert found == THEIRS[f"{name}, with{'' if tools else 'out'} tools"]


BAD, FAILS = "data.bad_chat_template", "data.chat_template_fails"
REFUSES = "data.chat_template_refuses"


@pytest.mark.parametrize(
    "template, refusal",
    [
        ("{{ raise_exception('alternate\n roles') }}", (REFUSES, "alternate roles")),
        ("{% if true %}\n{% speak %}", (BAD, "line 2", "'speak'")),
        ("{{ messages | shout }}", (BAD, "line 1", "'shout'")),
        ("{% for one in messages %}", (BAD, "line 1")),
        ("{{ messages[0].tool.name }}", (FAILS, "UndefinedError")),
        ("{{ 1 // 0 }}", (FAILS, "ZeroDivisionError")),
        ("{{ nothing | tojson }}", (FAILS, "TypeError")),
        ("{{ messages.append(1) }}", (FAILS, "SecurityError")),
        ("{{ messages[0]['content'][0][1] }}{{ 'a' * 'b' }}", (FAILS, "TypeError")),
    ],
)
def test_who_is_at_fault_is_said(template, refusal, refuses):
    # Jinja's words, and Python's, differ between versions.
    with refuses(*refusal, words=False) as caught:
        render_chat(template, MESSAGES)
    assert "\n" not in str(caught.value)


def test_the_day_is_todays():
    before = datetime.now()
    text = render_chat(DAY, MESSAGES)
    after = datetime.now()
    assert text in {one.strftime("%d %b %Y") for one in (before, after)}


def test_the_day_may_be_given():
    day = date(2024, 2, 29)
    assert render_chat(DAY, MESSAGES, today=day) == "29 Feb 2024"
    assert ChatTemplate(DAY, today=day).render(MESSAGES) == "29 Feb 2024"


class Role(str, Enum):  # noqa: UP042 - of a StrEnum `str` is the value already.
    USER = "user"


def test_a_template_is_given_text_numbers_and_lists_alone():
    values = [np.float32(2), np.longdouble(2), np.bool_(False), np.int8(3), True]
    values += [np.arange(4).reshape(2, 2), Role.USER, (1, None)]
    chat = [{"role": Role.USER, "content": values}]
    text = render_chat("{{ messages[0].role }} {{ messages[0].content }}", chat)
    assert (
        text == "user [2.0, 2.0, False, 3, True, [[0, 1], [2, 3]], 'user', (1, None)]"
    )


@pytest.mark.parametrize("value", [{1}, deque([1]), b"a", len, np.datetime64(1, "D")])
def test_a_value_of_another_kind_is_named_with_its_place(value, refuses):
    chat = [MESSAGES[0], {"role": "user", "content": [{"type": value}]}]
    where, kind = "messages[1]['content'][0]['type']", type(value).__name__
    with refuses("data.unknown_chat_value", where, kind):
        render_chat("", chat)
    with refuses("data.unknown_chat_value", "image", kind):
        render_chat("", MESSAGES, image=value)


@pytest.mark.parametrize(
    "files, refusal",
    [
        ({"tokenizer_config.json": {"chat_template": 3}}, (BAD,)),
        ({"tokenizer_config.json": {"chat_template": [{"name": "x"}]}}, (BAD,)),
        (
            {"tokenizer_config.json": {"chat_template": {"a": "1", "b": "2"}}},
            ("data.no_default_chat_template", "a, b"),
        ),
        ({"tokenizer_config.json": []}, ("data.unreadable_tokenizer_config", [])),
        ({"tokenizer_config.json": "{"}, ("data.unreadable_tokenizer_config",)),
    ],
)
def test_files_that_hold_no_template_are_named(files, refusal, tmp_path, refuses):
    folder = write_folder(tmp_path, files)
    with refuses(*refusal, words="{" not in files.values()):
        read_template(folder)


def test_a_gguf_gives_its_templates_and_tokens(tmp_path, refuses):
    gguf = pytest.importorskip("gguf")

    def written(pad, eos=1, names=("default", "tool_use")):
        path = tmp_path / f"{pad}-{eos}-{len(names)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_token_list(["<s>", "</s>", "<unk>", "<pad>"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(eos)
        writer.add_unk_token_id(2)
        writer.add_pad_token_id(pad)
        text = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}"
        texts = {"default": text, "tool_use": "tools"}
        writer.add_chat_template(
            [{"name": name, "template": texts[name]} for name in names]
        )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    found = read_template(written(3))
    assert found.render(MESSAGES) == "<s></s><unk><pad>"
    assert found.render(MESSAGES, tools=TOOLS) == "tools"
    # A token that no text begins or ends with is as if it was not there.
    assert read_template(written(4)).render(MESSAGES) == "<s></s><unk>"
    with refuses("data.token_out_of_range", "3-4-2.gguf", 4):
        read_template(written(3, eos=4))
    with refuses("data.no_default_chat_template", "tool_use", "default"):
        read_template(written(3, names=("tool_use",)))


def test_an_exported_model_keeps_all_templates(tmp_path):
    folder = write_folder(tmp_path / "theirs", FOLDERS["files"])
    (tmp_path / "ours").mkdir()
    copied = copy_tokenizer(folder, tmp_path / "ours")
    assert "additional_chat_templates/tool_use.jinja" in copied
    assert read_template(tmp_path / "ours") == read_template(folder)


def test_tokens_of_a_template_may_be_given_alone():
    template = ChatTemplate("{{ eos_token }}{{ pad_token }}", {"eos_token": "<e>"})
    assert template.render(MESSAGES) == "<e>"


def test_the_stored_texts_are_those_of_the_installed_transformers():
    pytest.importorskip("transformers")
    from tests.make_transformers_chats import of_folder, rendered

    for name, case in TEMPLATES.items():
        assert rendered(*case) == THEIRS[name], name
    for name in FOLDERS:
        assert of_folder(name) == THEIRS[f"{name}, without tools"], name
        assert of_folder(name, tools=TOOLS) == THEIRS[f"{name}, with tools"], name
