"""Names of the arrays of a user's tree: where its blocks are, and each one's axes."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshpar.errors import InputError, nearest
from meshpar.model.contract import NO_BLOCKS
from meshpar.model.loss.user_tree import UserLeaf
from meshpar.rules.rules import LogicalAxes

Names = Mapping[str, Sequence[str | None] | None]
"""Pattern of paths -> a logical axis, or None, for each dim; None for all whole."""


class UnmatchedNameWarning(UserWarning):
    """A pattern of `from_loss(names=)` matches no parameter."""


@dataclass(frozen=True, kw_only=True)
class BlockLeaves:
    """Where the arrays of the blocks are among a tree's leaves.

    Args:
        blocks: The path as the user gave it.
        name: Name of the group in the parameter tree.
        paths: Path of each array inside a block.
        positions: For each layer, the position of each of those arrays among all
            leaves; once if they are stacked.
        num_layers: Number of blocks.
        stacked: Whether each array holds all layers.
    """

    blocks: str
    name: str
    paths: tuple[tuple[str, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    num_layers: int
    stacked: bool


NONE = BlockLeaves(
    blocks="",
    name=NO_BLOCKS,
    paths=(),
    positions=((),),
    num_layers=1,
    stacked=False,
)
"""The one empty block of a model that is not cut."""


def find_groups(
    leaves: Sequence[UserLeaf], blocks: str | Sequence[str]
) -> tuple[BlockLeaves, ...]:
    """Return where the blocks of one path or of several are, each under its name.

    Raises:
        InputError: As for `find_blocks`; or no path is given, or two of one block.
    """
    paths = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    groups = [find_blocks(leaves, path) for path in paths]
    seen: dict[int, str] = {}
    for group in groups:
        for at in itertools.chain(*group.positions):
            if at in seen:
                raise InputError(
                    f"blocks={paths}: {leaves[at].name} is under both {seen[at]!r} and "
                    f"{group.blocks!r}; give paths that have no array in common",
                    key="model.blocks_overlap",
                )
            seen[at] = group.blocks
    if not groups:
        raise InputError(
            "blocks=() has no path; give one or more, or leave blocks= out",
            key="model.no_such_blocks",
        )
    if len({group.name for group in groups}) == len(groups):
        return tuple(groups)
    return tuple(replace(one, name=_group_name(_keys(one.blocks))) for one in groups)


def _group_name(keys: Sequence[str]) -> str:
    names = (key.replace("*", "").strip("_") for key in keys)
    return "_".join(filter(None, names)) or "blocks"


def find_blocks(leaves: Sequence[UserLeaf], blocks: str) -> BlockLeaves:
    """Return where the blocks of a path are.

    Raises:
        InputError: Nothing is there, or blocks have other arrays than the first.
    """
    keys = _keys(blocks)
    inside: dict[str, dict[tuple[str, ...], int]] = {}
    for position, leaf in enumerate(leaves):
        place = _block_index(leaf.path, keys)
        if place is not None and leaf.role != "random":
            inside.setdefault(place[0], {})[place[1]] = position
    if not inside:
        known = {"/".join(leaf.path[: len(keys)]) for leaf in leaves}
        raise InputError(
            f"blocks={blocks!r}: no parameter is under that path; "
            f"{nearest('/'.join(keys), known)}",
            key="model.no_such_blocks",
        )
    numbered = all(index.isdigit() for index in inside)
    order = sorted(inside, key=int) if numbered else []
    if not numbered:  # Parameters stacked over layers.
        inside = {"": {(i, *p): at for i, of in inside.items() for p, at in of.items()}}
        order = [""]
    first = inside[order[0]]
    num_layers = len(order) if numbered else _stacked_layers(leaves, first, blocks)
    for index in order:
        _check_equal(leaves, first, inside[index], blocks, order[0], index)
    return BlockLeaves(
        blocks=blocks,
        name=_group_name(keys[-1:]),
        paths=tuple(first),
        positions=tuple(
            tuple(inside[index][path] for path in first) for index in order
        ),
        num_layers=num_layers,
        stacked=not numbered,
    )


def _keys(path: str) -> list[str]:
    return [key for key in re.split(r"[/.]", path) if key]


def _block_index(
    path: tuple[str, ...], keys: Sequence[str]
) -> tuple[str, tuple[str, ...]] | None:
    """Return (number of the block, path inside it) of a leaf; None if it has none."""
    if len(path) < len(keys) or list(path[: len(keys) - 1]) != list(keys[:-1]):
        return None
    key = path[len(keys) - 1]
    if "*" in keys[-1]:
        pattern = re.escape(keys[-1]).replace(r"\*", r"(\d+)")
        match = re.fullmatch(pattern, key)
        return None if match is None else (match[1], path[len(keys) :])
    if key != keys[-1] or len(path) == len(keys):
        return None
    return path[len(keys)], path[len(keys) + 1 :]


def _stacked_layers(
    leaves: Sequence[UserLeaf], first: Mapping[Any, int], blocks: str
) -> int:
    sizes = {leaves[at].shape[:1] for at in first.values()}
    if len(sizes) != 1 or sizes == {()}:
        shapes = {leaves[at].name: leaves[at].shape for at in first.values()}
        raise InputError(
            f"blocks={blocks!r}: under that path are neither blocks by number nor "
            f"arrays with one leading dim of layers, but {shapes}",
            key="model.blocks_not_stacked",
        )
    return int(sizes.pop()[0])


def _check_equal(
    leaves: Sequence[UserLeaf],
    first: Mapping[tuple[str, ...], int],
    other: Mapping[tuple[str, ...], int],
    blocks: str,
    *indices: str,
) -> None:
    def arrays(block: Mapping[tuple[str, ...], int]) -> dict[str, str]:
        return {
            "/".join(path): f"{leaves[at].dtype}{leaves[at].shape} {leaves[at].role}"
            for path, at in block.items()
        }

    first_arrays, other_arrays = arrays(first), arrays(other)
    for path in sorted(first_arrays.keys() | other_arrays.keys()):
        if first_arrays.get(path) != other_arrays.get(path):
            raise InputError(
                f"blocks={blocks!r}: blocks {indices[0]} and {indices[1]} differ: "
                f"{path} is {first_arrays.get(path, 'absent')} and "
                f"{other_arrays.get(path, 'absent')}; name a path whose blocks are "
                "equal, or leave blocks= out",
                key="model.blocks_differ",
            )


def leaf_axes(
    leaves: Sequence[UserLeaf],
    names: Names,
    groups: Sequence[BlockLeaves],
) -> tuple[list[LogicalAxes], dict[str, str]]:
    """Return the logical axes of each leaf, and what lint reports about the names.

    A dim of stacked layers has no name; a pattern may have None for it.

    Raises:
        InputError: A pattern has a name for too many dims, or too few.
    """
    stacked = {at for one in groups if one.stacked for at in one.positions[0]}
    expressions = {pattern: path_expression(pattern) for pattern in names}
    unused, unnamed = set(names), []
    axes: list[LogicalAxes] = []
    for position, leaf in enumerate(leaves):
        shape = leaf.shape[1:] if position in stacked else leaf.shape
        path = "/" + "/".join(leaf.path)
        matching = [
            name
            for name, expression in expressions.items()
            if expression.fullmatch(path)
        ]
        unused -= set(matching)
        if matching:
            axes.append(_pattern_axes(matching[0], names[matching[0]], leaf, shape))
        elif leaf.logical_axes is not None:
            axes.append(leaf.logical_axes[len(leaf.shape) - len(shape) :])
        else:
            axes.append((None,) * len(shape))
            if len(shape) > 1 and leaf.role == "param":
                unnamed.append(leaf.name)
    return axes, _name_problems(leaves, sorted(unused), unnamed if names else [])


def _pattern_axes(
    pattern: str,
    names: Sequence[str | None] | None,
    leaf: UserLeaf,
    shape: tuple[int, ...],
) -> LogicalAxes:
    """Return the axes that a pattern gives a parameter of one layer's shape."""
    if names is None:
        return (None,) * len(shape)
    layers = len(leaf.shape) - len(shape)
    if len(names) == len(leaf.shape) and not any(names[:layers]):
        return tuple(names[layers:])
    if len(names) != len(shape):
        raise InputError(
            f"names={{{pattern!r}: {tuple(names)}}} has {len(names)} names, but "
            f"{leaf.name} has {len(shape)} dims, of shape {shape}; give one, or None, "
            "for each",
            key="model.wrong_number_of_names",
        )
    return tuple(names)


def _name_problems(
    leaves: Sequence[UserLeaf], unused: Sequence[str], unnamed: Sequence[str]
) -> dict[str, str]:
    """Return what lint reports; warn of patterns that match nothing."""
    examples = ", ".join("/".join(leaf.path) for leaf in leaves[:3])
    problems = {
        f"names[{pattern!r}]": f"matches no parameter; known: {examples}, ..."
        for pattern in unused
    }
    for pattern, problem in problems.items():
        warnings.warn(f"{pattern} {problem}", UnmatchedNameWarning, stacklevel=4)
    if unnamed:
        paths = dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in unnamed)
        problems["names"] = (
            f"no pattern matches {', '.join(paths)}, so tensor does not split them; "
            "give them names, or keep them whole with '**': None as the last pattern"
        )
    return problems


def path_expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of a path pattern: `*` is in a key, `**` is any keys."""
    expression = ""
    for key in _keys(pattern):
        if key == "**":
            expression += "(?:/[^/]+)*"
        else:
            expression += "/" + re.escape(key).replace(r"\*", "[^/]*")
    return re.compile(expression)
