"""Words of `--model` from which `meshpar train` builds the model of a plan."""

from __future__ import annotations

from meshpar.cli.parsing import parse_sizes
from meshpar.errors import InputError
from meshpar.planner.workload.workload import Workload

_GPT2_ONLY = ("learned_positions", "layer_norm", "biases", "tied")
"""Properties of a GPT-2 that `meshpar train --model` has no words for."""

_POSITIONS = 1024
"""Longest sequence of a GPT-2 whose words do not give `max_seq`, in tokens."""


def words_to_train(
    words: str | None, preset: str | None, workload: Workload, seq: int
) -> str | None:
    """Return the words of `--model` that give the model that was planned.

    Args:
        words: Those of the plan.
        preset: What they change, if anything.
        workload: What was planned.
        seq: Tokens of a sequence.

    Raises:
        InputError: No words do.
    """
    if not words or "=" not in words:
        return words
    sizes = parse_sizes(words)
    parts = dict(part.split("=", 1) for part in words.split(","))
    is_gpt2 = preset is None and not workload.experts and not workload.gated
    own = [name for name in _GPT2_ONLY if sizes.get(name) not in (None, False)]
    planned = own and own != [*_GPT2_ONLY] if is_gpt2 else own and own != ["tied"]
    if planned:
        raise InputError(
            f"{', '.join(own)} are of no model here together; give --model words with "
            f"{', '.join(_GPT2_ONLY)} all true, which are a GPT-2, or none",
            key="command.words_of_no_model",
        )
    for name in _GPT2_ONLY if is_gpt2 else _GPT2_ONLY[:3]:
        parts.pop(name, None)
    if workload.experts:
        parts.setdefault("expert_ffn", str(workload.expert_ffn))
    elif workload.gated and preset is None:
        parts.setdefault("ffn", str(workload.ffn))
    positions = workload.seq if "seq" in sizes or preset else _POSITIONS
    learned = is_gpt2 or workload.learned_positions
    if learned and "max_seq" not in parts and seq > positions:
        parts["seq"] = str(seq)
    return ",".join(f"{name}={value}" for name, value in parts.items())
