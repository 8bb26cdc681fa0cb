"""Our config from the plain values that a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from meshpar import InputError
from meshpar.model.lora import LoRA
from meshpar.models.layers.rope import RopeScaling, YarnScaling
from meshpar.models.presets import FAMILIES

_T = TypeVar("_T")


def config_from_sizes(sizes: Mapping[str, Any]) -> Any:
    """The config whose fields those are.

    Fields that it has got since then keep their defaults.

    Raises:
        InputError: No family has such fields.

    Example:
        >>> from dataclasses import asdict
        >>> from meshpar.models.presets import PRESETS
        >>> config_from_sizes(asdict(PRESETS["tiny-gpt2"])).layers
        4
    """
    kinds = [family.config for family in FAMILIES if _takes(family.config, sizes)]
    if not kinds:
        raise InputError(
            f"no family of models has exactly {', '.join(sorted(sizes)) or 'no sizes'}",
            key="weights.no_family_of_sizes",
        )
    # A field that another family has not tells more than those that both have.
    kind = min(kinds, key=lambda one: len(fields(one)))
    values = dict(sizes)
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping):
        scaled = YarnScaling if "beta_fast" in scaling else RopeScaling
        values["rope_scaling"] = _built(scaled, scaling)
    return kind(**values)


def read_lora(values: Mapping[str, Any]) -> LoRA:
    """Return the low-rank changes whose fields those are.

    Raises:
        InputError: They are other fields, or have values that cannot be.
    """
    return _built(LoRA, values)


def _built(kind: type[_T], values: Mapping[str, Any]) -> _T:
    if not _takes(kind, values):
        raise InputError(
            f"{kind.__name__} does not have exactly the fields "
            f"{', '.join(map(repr, sorted(values))) or 'none'}, as a checkpoint says; "
            "it was changed, or is of a newer version",
            key="weights.unknown_stored_fields",
        )
    return kind(**values)


def _takes(kind: type, sizes: Mapping[str, Any]) -> bool:
    known = {field.name: field for field in fields(kind)}
    needed = {
        name for name, field in known.items() if field.default is field.default_factory
    }
    return sizes.keys() <= known.keys() and needed <= sizes.keys()
