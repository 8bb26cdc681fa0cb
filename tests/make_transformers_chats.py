"""Makes `tests/data/transformers_chats.json`: what Transformers renders.

    python -m tests.make_transformers_chats

Needs `transformers` and `jinja2` without torch. It was made with transformers 5.24.0
and jinja2 3.1.6.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.chat_cases import FOLDERS, MESSAGES, STORED, TEMPLATES, TOOLS, write_folder


def main() -> None:
    """Writes the file."""
    found = {name: rendered(*TEMPLATES[name]) for name in TEMPLATES}
    for name in FOLDERS:
        found[f"{name}, without tools"] = of_folder(name)
        found[f"{name}, with tools"] = of_folder(name, tools=TOOLS)
    STORED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def rendered(template: str, given: dict[str, Any]) -> str | None:
    """The text of a case, under the tokens of a folder that has all."""
    given = {"add_generation_prompt": True, "chat": MESSAGES, **given}
    chat = given.pop("chat")
    return of_folder("all tokens", chat, chat_template=template, **given)


def of_folder(name: str, chat: Any = MESSAGES, **given: Any) -> str | None:
    """The text under a folder's own template."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), FOLDERS[name])
        given = {"add_generation_prompt": True, **given}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        try:
            return tokenizer.apply_chat_template(chat, tokenize=False, **given)
        except Exception:  # Of many kinds; all of them refuse the template.
            return None


if __name__ == "__main__":
    main()
