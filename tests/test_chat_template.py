"""Chat templates render as Transformers renders them, and say whose fault it is."""

import json
import re
from datetime import datetime

import numpy as np
import pytest

from meshpar import InputError
from meshpar.models.convert.chat_template import (
    ChatTemplate,
    read_template,
    render_chat,
)
from meshpar.models.convert.writing import copy_tokenizer
from tests.chat_cases import (
    FOLDERS,
    MESSAGES,
    STORED,
    TEMPLATES,
    TOOLS,
    write_folder,
)

pytest.importorskip("jinja2")
THEIRS = json.loads(STORED.read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_folders_template_and_tokens_are_those_of_transformers(name, tools, tmp_path):
    folder = write_folder(tmp_path, FOLDERS[name])
    try:
        found = read_template(folder).render(MESSAGES, tools=tools)
    except InputError as error:
        found = None
        if error.key == "data.no_default_chat_template":
            return  # Theirs takes it with tools; no recipe here has any.
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
    before, after = datetime.now(), datetime.now()
    text = render_chat("{{ strftime_now('%d %b %Y') }}", MESSAGES)
    assert text in {one.strftime("%d %b %Y") for one in (before, after)}


def test_a_template_reaches_no_method_of_what_it_is_given():
    class Image:
        def save(self):
            return "written"

    chat = [{"role": "user", "content": [Image(), np.float32(2), np.bool_(False)]}]
    template = "{{ messages[0].content }}{{ messages[0].content[0].save }}"
    assert render_chat(template, chat) == "['<Image>', 2.0, False]"


@pytest.mark.parametrize(
    "files, refusal",
    [
        ({"tokenizer_config.json": {"chat_template": 3}}, (BAD,)),
        ({"tokenizer_config.json": {"chat_template": [{"name": "x"}]}}, (BAD,)),
        (
            {"tokenizer_config.json": {"chat_template": {"a": "1", "b": "2"}}},
            ("data.no_default_chat_template", "a, b"),
        ),
        ({"tokenizer_config.json": []}, ("weights.not_json_object", [])),
        ({"tokenizer_config.json": "{"}, ("weights.unreadable_json",)),
    ],
)
def test_files_that_hold_no_template_are_named(files, refusal, tmp_path, refuses):
    folder = write_folder(tmp_path, files)
    with refuses(*refusal, words="{" not in files.values()):
        read_template(folder)


def test_a_gguf_gives_its_templates_and_tokens(tmp_path, refuses):
    gguf = pytest.importorskip("gguf")

    def written(pad):
        path = tmp_path / f"{pad}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_token_list(["<s>", "</s>", "<unk>", "<pad>"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(2)
        writer.add_pad_token_id(pad)
        text = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}"
        writer.add_chat_template(
            [
                {"name": "default", "template": text},
                {"name": "tool_use", "template": "tools"},
            ]
        )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    found = read_template(written(3))
    assert found.render(MESSAGES) == "<s></s><unk><pad>"
    assert found.render(MESSAGES, tools=TOOLS) == "tools"
    with refuses("data.token_out_of_range", "4.gguf", 4):
        read_template(written(4))


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
    from tests.make_transformers_chats import rendered

    for name, case in TEMPLATES.items():
        assert rendered(*case) == THEIRS[name], name
    assert re.search("é", THEIRS["tojson"])
