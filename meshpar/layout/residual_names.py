"""Which named residuals a layout keeps or moves to the host, as text.

remat=save:attention_out/mlp_up
remat=offload:attention_qkv
remat=save:mlp_up+offload:attention_qkv/attention_out
remat=offload:block_input
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshpar.errors import InputError

BLOCK_INPUT = "block_input"
"""The stream that a block takes, which every policy keeps: named so, it can be moved to
the host's memory."""

_WAYS = ("save", "offload")
_FORM = "write for example save:mlp_up/attention_out or save:mlp_up+offload:mlp_hidden"


@dataclass(frozen=True, kw_only=True)
class ResidualNames:
    """Residuals that a block's backward keeps beside its input; it recomputes others.

    Args:
        save: Residuals kept on the device.
        offload: Residuals kept in the host's memory.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ResidualNames:
        """The names in `text`.

        Raises:
            InputError: The text is not of that form, or says one thing twice.

        Example:
            >>> ResidualNames.parse("save:mlp_up+offload:attention_qkv/attention_out")
            ResidualNames(save=('mlp_up',), offload=('attention_qkv', 'attention_out'))
        """
        named: dict[str, tuple[str, ...]] = {}
        for part in text.split("+"):
            way, _, names = part.partition(":")
            if way not in _WAYS or not re.fullmatch(r"\w+(/\w+)*", names):
                raise InputError(
                    f"remat={text}: {part!r} names no residuals; {_FORM}",
                    key="layout.no_residuals_named",
                )
            if way in named:
                raise InputError(
                    f"remat={text}: {way!r} is given twice; give it once",
                    key="layout.repeated_remat_way",
                )
            named[way] = tuple(names.split("/"))
        every = [name for names in named.values() for name in names]
        for name in every:
            if every.count(name) > 1:
                raise InputError(
                    f"remat={text}: {name!r} is named twice; name it once",
                    key="layout.repeated_residual",
                )
        return cls(**named)

    @property
    def every(self) -> tuple[str, ...]:
        """All names."""
        return (*self.save, *self.offload)


def is_named(remat: str) -> bool:
    """Return True if a remat policy names residuals."""
    return ":" in remat or "+" in remat
