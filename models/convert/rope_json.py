"""The rotary positions of a `config.json`, under each of its names for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshpar import InputError
from meshpar.models.layers.rope import RopeScaling

_NAMES = ("rope_scaling", "rope_parameters")
_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_READ = {
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
"""Type -> what it reads. `default` reads nothing, whatever else is there."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a config.

    Args:
        kind: Its `rope_type`, `default` where nothing is scaled.
        values: Its keys that are not null.
    """

    kind: str
    values: Mapping[str, Any]

    def theta(self, otherwise: Any) -> Any:
        """Return the base of the frequencies.

        Args:
            otherwise: `rope_theta` of the config itself, taken where there is none
                among the rotary positions.
        """
        return self.values.get("rope_theta", otherwise)

    def scaling(self) -> RopeScaling | None:
        """Return the scaling of a `llama3`; None of a `default`.

        Raises:
            KeyError: One of its numbers is missing.
            InputError: One of its numbers is out of range.
        """
        if self.kind == "default":
            return None
        return RopeScaling(
            factor=self.values["factor"],
            low_factor=self.values["low_freq_factor"],
            high_factor=self.values["high_freq_factor"],
            original_seq=self.values["original_max_position_embeddings"],
        )


def read_rope(values: Mapping[str, Any], known: tuple[str, ...]) -> Rope:
    """Return the positions of a config that has the same ones in all layers.

    Configs written by Transformers 5 hold them as `rope_parameters`, which has
    `rope_theta` too; older ones as `rope_scaling`, which goes before.

    Args:
        values: Of the `config.json`.
        known: The types that the model here computes, `default` first.

    Raises:
        InputError: They are no object, or of another type, or say what that type does
            not read.
    """
    ropes = {name: rope_object(values, name) for name in _NAMES}
    rope = rope_as(ropes["rope_scaling"] or ropes["rope_parameters"], known)
    beside = values.get("original_max_position_embeddings")
    original = rope.values.get("original_max_position_embeddings")
    if rope.kind != "default" and None not in (beside, original) and beside != original:
        raise InputError(
            f"original_max_position_embeddings={beside!r}, and {original!r} in the "
            "object of its rotary positions: leave one of them out",
            key="weights.contradictory_config_values",
        )
    return rope


def rope_object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one of a config's objects of positions; empty where it is null or absent.

    Raises:
        InputError: It is no object.
    """
    found = values.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InputError(
            f"{name}={found!r}: must be an object, such as "
            '{"rope_type": "llama3", "factor": 8.0, ...}, or null',
            key="weights.rope_scaling_not_object",
        )
    return found


def rope_as(given: Mapping[str, Any], known: tuple[str, ...]) -> Rope:
    """Return rotary positions, checked to be of a known type with known keys.

    Args:
        given: One of a config's objects of positions.
        known: The types that the model here computes, `default` first.

    Raises:
        InputError: Their type is not among `known`, `rope_type` and `type` differ, or
            they have a key that their type does not read.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if given.get("truncate", True) is None:
        values["truncate"] = False
    kinds = [values[name] for name in ("rope_type", "type") if name in values]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise InputError(
            f"rope_type={kinds[0]!r} and type={kinds[1]!r}, which are two names of one "
            "type: leave one of them out",
            key="weights.contradictory_config_values",
        )
    is_plain = not kinds and values.keys() <= {*_OF_ALL}
    kind = "default" if is_plain else next(iter(kinds), None)
    if kind not in known:
        scaled = ", ".join(known[1:] or known)
        raise InputError(
            f"rope_scaling of type {kind!r} is not known here; known: {scaled}",
            key="weights.unknown_rope_scaling",
        )
    unread = values.keys() - {*_OF_ALL, *_READ.get(kind, values)}
    if unread:
        raise InputError(
            f"rope_scaling of type {kind!r} with {', '.join(sorted(unread))}, which is "
            f"not known here; known: {', '.join((*_OF_ALL, *_READ[kind]))}",
            key="weights.unknown_rope_key",
        )
    return Rope(kind, values)
