"""Which pages of a pool are free: the host's book of a device's cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshpar.errors import InputError


@dataclass
class PageBook:
    """The pages of the devices that share a part of the batch.

    Args:
        num_pages: How many there are.
        tokens_per_page: Tokens of one example that lie in one, over all its devices.

    Example:
        >>> book = PageBook(num_pages=4, tokens_per_page=16)
        >>> book.grow([], 17)
        [0, 1]
        >>> book.num_free
        2
    """

    num_pages: int
    tokens_per_page: int
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_pages))[::-1]

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages for so many tokens of one example."""
        return -(-tokens // self.tokens_per_page)

    def fits(self, held: list[int], tokens: int) -> bool:
        """Whether an example that holds pages can have so many tokens."""
        return self.needed(tokens) - len(held) <= self.num_free

    def grow(self, held: list[int], tokens: int) -> list[int]:
        """The pages of an example that is to have so many tokens.

        Raises:
            InputError: There are not as many.
        """
        if not self.fits(held, tokens):
            raise InputError(
                f"{tokens} tokens need {self.needed(tokens)} pages, but only "
                f"{self.num_free} of {self.num_pages} are free beside the "
                f"{len(held)} held",
                key="generation.no_free_pages",
            )
        more = self.needed(tokens) - len(held)
        return held + [self._free.pop() for _ in range(max(0, more))]

    def release(self, held: list[int]) -> None:
        """Gives an example's pages back."""
        self._free.extend(reversed(held))
