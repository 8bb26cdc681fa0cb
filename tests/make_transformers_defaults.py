"""Makes `tests/data/transformers_defaults.json`: what Transformers makes of configs.

    python -m tests.make_transformers_defaults

Needs `transformers` without torch. Run it again where a family, a key or a case is
added. It was made with transformers 5.24.0.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.transformers_configs import BASES, STORED, ConfigCase, cases_of, meaning


def main() -> None:
    """Writes the file."""
    lines = []
    for kind in BASES:
        found = {case.label: theirs(kind, case) for case in cases_of(kind)}
        whole = found["as it is"] or {}
        differences = {
            label: None if one is None else _difference(one, whole)
            for label, one in found.items()
        }
        stored = {"as it is": whole, "differences": differences}
        lines.append(f"{json.dumps(kind)}: {json.dumps(stored, sort_keys=True)}")
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _difference(one: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    names = sorted({*one, *whole})
    return {name: one.get(name) for name in names if one.get(name) != whole.get(name)}


def theirs(kind: str, case: ConfigCase) -> dict[str, Any] | None:
    """Return what a config means to Transformers; None if it cannot be read."""
    import transformers

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(case.values(kind)))
        try:
            config = transformers.AutoConfig.from_pretrained(name)
            found = meaning(json.loads(json.dumps(config.to_dict())))
        except Exception:  # Of many kinds; all of them refuse the config.
            return None
    # A base of null fails where the model is built.
    return None if '"rope_theta": null' in json.dumps(found) else found


if __name__ == "__main__":
    main()
