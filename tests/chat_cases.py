"""Chat templates, conversations and tokenizer files, for Transformers and for ours.

`tests/make_transformers_chats.py` lets Transformers render them and writes the texts;
`tests/test_chat_template.py` compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "data" / "transformers_chats.json"
"""Name of a case -> the text that Transformers makes; null if it makes none."""

MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Où est l'été ?"},
    {"role": "assistant", "content": "Là.", "tool_calls": None},
    {"role": "user", "content": "日本"},
]
CALL = {"name": "add", "arguments": {"b": 2, "a": "é<&>'\""}}
CALLED = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4.", "reasoning": "It is 4."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a & b"}}]
DOCUMENTS = [{"title": "T", "text": "x < y"}]

_EACH = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
# Name -> template, and what else it is rendered with.
TEMPLATES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "plain": (_EACH, {}),
    "prompt": (_EACH + "{% if add_generation_prompt %}>{% endif %}", {}),
    "prompt off": (
        _EACH + "{% if add_generation_prompt %}>{% endif %}",
        {"add_generation_prompt": False},
    ),
    "tojson": ("{{ messages | tojson }}", {}),
    "tojson of a call": ("{{ messages[1].tool_calls | tojson }}", {"chat": CALLED}),
    "tojson indented": ("{{ messages | tojson(indent=2) }}", {"chat": CALLED}),
    "tojson separators": ("{{ messages | tojson(separators=(',', ':')) }}", {}),
    "tojson sorted": ("{{ messages | tojson(sort_keys=true) }}", {"chat": CALLED}),
    "tojson ascii": ("{{ messages | tojson(ensure_ascii=true) }}", {}),
    "tojson of nothing": ("{{ nothing | tojson }}", {}),
    "tools are none": ("{{ tools is none }} {{ tools is defined }} {{ tools }}", {}),
    "documents are none": ("{{ documents is none }} {{ documents }}", {}),
    "tools": ("{% if tools %}{{ tools | tojson }}{% endif %}", {"tools": TOOLS}),
    "documents": ("{{ documents[0].text }}", {"documents": DOCUMENTS}),
    "tokens": ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}", {}),
    "other tokens": ("{{ sep_token }}|{{ cls_token }}|{{ mask_token }}", {}),
    "own tokens": ("{{ image_token }}|{{ audio_token }}|{{ nothing }}", {}),
    "generation": (
        "{% for one in messages %}{% if one.role == 'assistant' %}"
        "{% generation %}{{ one.content }}{% endgeneration %}"
        "{% else %}{{ one.content }}{% endif %}\n{% endfor %}",
        {},
    ),
    "generation, trimmed": (
        "a\n  {%- generation -%}\n  b {% set x = 1 %}\n{%- endgeneration %}\nc{{ x }}",
        {},
    ),
    "break": (
        "{% for one in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ one.role }}{% endfor %}",
        {},
    ),
    "continue": (
        "{% for one in messages %}{% if one.role == 'user' %}{% continue %}{% endif %}"
        "{{ one.role }}{% endfor %}",
        {},
    ),
    "strftime_now": ("{{ strftime_now('%%') }}{{ strftime_now('day') }}", {}),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for one in messages %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        {},
    ),
    "namespace of itself": ("{{ namespace(self=1).self }}{{ dict(a=2).a }}", {}),
    "namespace hidden": ("{{ namespace(_x=1)._x }}", {}),
    "namespace set": ("{% set n = namespace() %}{% set n._x = 1 %}1", {}),
    "a null is not there": (
        "{% for one in messages %}{{ one.tool_calls is defined }}"
        "{{ one.content is defined }}{% endfor %}",
        {"chat": CALLED},
    ),
    "reasoning": (
        "{{ messages[3].reasoning_content }}{{ messages[3].thinking }}",
        {"chat": CALLED},
    ),
    "blocks": ("  {% if true %}\n    x\n  {% endif %}\ny\n\n", {}),
    "slices": (
        "{{ messages[0]['content'] }}{% for one in messages[1:] %}"
        "{{ one['content'] | trim | upper }}{{ loop.last }}{% endfor %}",
        {},
    ),
    "macro": (
        "{% macro say(one) %}<{{ one.role }}>{% endmacro %}"
        "{% for one in messages %}{{ say(one) }}{% endfor %}",
        {},
    ),
    "raise": ("{{ raise_exception('no system message') }}", {}),
    "unknown tag": ("{% speak %}", {}),
    "unknown filter": ("{{ messages | shout }}", {}),
    "no end": ("{% for one in messages %}", {}),
    "missing": ("{{ messages[0].tool.name }}", {}),
    "by zero": ("{{ 1 // 0 }}", {}),
    "sandbox": ("{{ messages.append(1) }}", {}),
    "dunder": ("{{ ''.__class__.__mro__ }}", {}),
}

_TOKEN = {"content": "<s>", "lstrip": False, "normalized": False, "special": True}
_MARKED = {"__type": "AddedToken", **_TOKEN}
_FULL = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _MARKED,
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": {**_MARKED, "content": "<unk>"},
    "sep_token": None,
    "image_token": "<img>",
    "add_bos_token": True,
    "extra_special_tokens": {"audio_token": "<aud>"},
}
_ALL_TOKENS = "".join(
    f"{name}=[{{{{ {name}_token }}}}]"
    for name in (*("bos", "eos", "unk", "sep", "pad", "cls", "mask"), "image", "audio")
)
_NAMED = [
    {"name": "default", "template": "default{{ tools }}"},
    {"name": "tool_use", "template": "with{{ tools | length }}"},
]
_JINJA = "chat_template.jinja"
_MORE = "additional_chat_templates/tool_use.jinja"

# Name -> the files of a folder, beside a tokenizer.json.
FOLDERS: Mapping[str, dict[str, Any]] = {
    "all tokens": {"tokenizer_config.json": {**_FULL, "chat_template": _ALL_TOKENS}},
    "a map of tokens": {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": _ALL_TOKENS,
            "eos_token": "<old>",
        },
        "special_tokens_map.json": {"eos_token": "</s>", "pad_token": _TOKEN},
    },
    "a map beside decoded tokens": {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": _ALL_TOKENS,
            "eos_token": "<new>",
            "added_tokens_decoder": {"1": {**_TOKEN, "content": "<new>"}},
        },
        "special_tokens_map.json": {"eos_token": "</s>", "pad_token": _TOKEN},
    },
    "a list": {"tokenizer_config.json": {**_FULL, "chat_template": _NAMED}},
    "a list without a default": {
        "tokenizer_config.json": {**_FULL, "chat_template": _NAMED[1:]}
    },
    "a file": {
        "tokenizer_config.json": {**_FULL, "chat_template": "old"},
        _JINJA: "new {{ eos_token }}\n",
    },
    "files": {
        "tokenizer_config.json": {**_FULL, "chat_template": "old"},
        _JINJA: "new",
        _MORE: "tools",
    },
    "a file for tools alone": {
        "tokenizer_config.json": {**_FULL, "chat_template": "old"},
        _MORE: "tools",
    },
    "none": {"tokenizer_config.json": _FULL},
    **{
        f"silent {kind}": {
            "tokenizer_config.json": {
                "tokenizer_class": kind,
                "chat_template": _ALL_TOKENS,
            }
        }
        for kind in (
            *("GPT2Tokenizer", "GPT2TokenizerFast", "LlamaTokenizerFast"),
            *("Qwen2Tokenizer", "GemmaTokenizerFast", "PreTrainedTokenizerFast"),
        )
    },
    "null Qwen2Tokenizer": {
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "chat_template": _ALL_TOKENS,
            "pad_token": None,
            "unk_token": None,
        }
    },
}


def write_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write the files of a tokenizer that knows a few words."""
    words = ["<unk>", "<s>", "</s>", "<pad>", "<new>", "<old>", "<img>", "<aud>", "a"]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: at for at, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
    for name, said in {"tokenizer.json": tokenizer, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said if isinstance(said, str) else json.dumps(said))
    return folder
