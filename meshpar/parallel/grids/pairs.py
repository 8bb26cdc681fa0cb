"""Triangle products and attention of split pair representations.

A pair representation has a vector for every two of N residues. P devices share it along
rows, columns or both. Operations on whole rows get them by all-to-alls (`moves`) that
split columns, channels or rows instead: a device never holds more than a multiple of
its N^2 / P pairs.
Reference: Jumper et al. 2021 (AlphaFold 2), supplement, algorithms 11 to 14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked, sum_dtype
from meshpar.errors import InputError
from meshpar.model.scope import Scope
from meshpar.parallel.grids.pencils import Move, on_split
from meshpar.rules.rules import Split, array_split, degree

PAIRS = ("batch", "pair_rows", "pair_columns", None)
"""Logical axes of a pair representation."""

ROWS, COLUMNS, CHANNELS = 1, 2, 3

Line = Literal["row", "column"]
"""Direction of attention: `row` (starting node) or `column` (ending node)."""


def triangle_product(
    left: jax.Array, right: jax.Array, scope: Scope, *, outgoing: bool
) -> jax.Array:
    """Return each pair's sum over the third node of a triangle, for each channel.

        outgoing: out_ij = sum_k left_ik right_jk    (algorithm 11)
        incoming: out_ij = sum_k left_ki right_kj    (algorithm 12)

    The channels are split instead of the pairs meanwhile: one all-to-all for each mesh
    axis, array and the result, 3 N^2 channels / P values sent by each device, and as
    many in the backward. Gathering rows would take sqrt(P) times that.

    Args:
        left: (batch, rows, columns, channels), laid out as `PAIRS`.
        right: As `left`.
        scope: Scope whose rules split the pairs.
        outgoing: The first of the two formulas, else the second.

    Returns:
        Shaped and laid out as `left`.

    Raises:
        InputError: The channels do not divide over all devices that share the pairs.
        RuleError: Rows or columns do not divide over their mesh axes.
    """
    split = array_split(scope.rules, PAIRS, left.shape)
    moves = [
        Move(mesh_axes=split[dim], source=dim, target=CHANNELS)
        for dim in (ROWS, COLUMNS)
        if split[dim]
    ]
    _check_channels(left.shape[CHANNELS], split)
    subscripts = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"

    def local(left: jax.Array, right: jax.Array) -> jax.Array:
        for move in moves:
            left, right = move(left, "triangle"), move(right, "triangle")
        out = jnp.einsum(subscripts, left, right)
        for move in reversed(moves):
            out = move.undone(out, "triangle")
        return out

    return on_split(local, left, right, splits=(split, split), out_split=split)


def whole_lines(z: jax.Array, scope: Scope, line: Line) -> jax.Array:
    """Give each device whole rows, or whole columns, of pairs: one all-to-all.

    Args:
        z: (batch, rows, columns, channels), laid out as `PAIRS`.
        scope: Scope whose rules split the pairs.
        line: Which of both become whole.

    Raises:
        InputError: The others do not divide over all devices.
        RuleError: Rows or columns do not divide over their mesh axes.
    """
    split = array_split(scope.rules, PAIRS, z.shape)
    move = _whole(split, line, z.shape)
    return z if move is None else _moved(z, split, move)


def shared_lines(z: jax.Array, scope: Scope, line: Line) -> jax.Array:
    """Undo `whole_lines`."""
    split = array_split(scope.rules, PAIRS, z.shape)
    move = _whole(split, line, z.shape)
    return z if move is None else _moved(z, move.after(split), move.undone)


def triangle_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gate: jax.Array,
    gate_bias: jax.Array,
    bias: jax.Array,
    scope: Scope,
    line: Line,
) -> jax.Array:
    """Apply gated attention along lines, with a bias from the triangle's third side.

        row:    out_ij = g_ij sum_k softmax_k(q_ij k_ik / sqrt(d) + bias_jk) v_ik
        column: out_ij = g_ij sum_k softmax_k(q_ij k_kj / sqrt(d) + bias_ki) v_kj
        g_ij = sigmoid(gate_ij + gate_bias)

    The gate is included because XLA:TPU would split its heads and move it there and
    back.

    A device has whole lines, and gathers the bias of some queries of all lines at a
    time, N^2 heads values in all; the backward gathers it again and scatters its
    gradient. Scores are made for some lines and queries at a time, and recomputed in
    the backward.

    Args:
        q: (batch, rows, columns, heads, head_dim), laid out as `whole_lines` gives.
        k: Keys, as `q`.
        v: Values, as `q`.
        gate: As `q`.
        gate_bias: (heads, head_dim).
        bias: (batch, rows, columns, heads).
        scope: Scope whose rules split the pairs.
        line: Direction of attention.

    Returns:
        Shaped and laid out as `q`.
    """
    split = array_split(scope.rules, PAIRS, bias.shape)
    move = _whole(split, line, bias.shape)
    lines = split if move is None else move.after(split)
    mesh_axes = lines[ROWS if line == "row" else COLUMNS]

    def local(gate_bias: jax.Array, bias: jax.Array, *qkvg: jax.Array) -> jax.Array:
        q, k, v, gate = (
            x if line == "row" else x.swapaxes(ROWS, COLUMNS) for x in qkvg
        )
        bias = bias if line == "row" else bias.swapaxes(ROWS, COLUMNS)
        out = _attended(q, k, v, bias, mesh_axes)
        out = jax.nn.sigmoid(gate + gate_bias.astype(gate.dtype)) * out
        return out if line == "row" else out.swapaxes(ROWS, COLUMNS)

    # Their gradients are summed over devices in this dtype.
    bias = bias.astype(sum_dtype(bias.dtype, scope.platform))
    gate_bias = gate_bias.astype(sum_dtype(gate_bias.dtype, scope.platform))
    head_split = (*lines, ())
    splits = (((), ()), lines, *4 * (head_split,))
    given = (gate_bias, bias, q, k, v, gate)
    return on_split(local, *given, splits=splits, out_split=head_split)


def _check_channels(channels: int, split: Split) -> None:
    mesh_axes = split[ROWS] + split[COLUMNS]
    devices = degree(mesh_axes)
    if channels % devices:
        raise InputError(
            f"a triangle product splits its {channels} channels over the {devices} "
            f"devices of {' x '.join(mesh_axes)} that share the pairs, which does not "
            "divide them; choose channels that do, or map 'pair_rows' or "
            "'pair_columns' to fewer",
            key="layout.indivisible",
        )


def _whole(split: Split, line: Line, shape: tuple[int, ...]) -> Move | None:
    """Return the move that makes rows or columns whole; None if they are whole."""
    source, target = (COLUMNS, ROWS) if line == "row" else (ROWS, COLUMNS)
    if not split[source]:
        return None
    mesh_axes = split[target] + split[source]
    if shape[target] % degree(mesh_axes):
        name = PAIRS[target]
        raise InputError(
            f"triangle attention shares its {shape[target]} {line}s over the "
            f"{degree(mesh_axes)} devices of {' x '.join(mesh_axes)}, which does not "
            f"divide them; pad {name!r}, or map it or {PAIRS[source]!r} to fewer",
            key="layout.indivisible",
        )
    return Move(mesh_axes=split[source], source=source, target=target)


def _moved(z: jax.Array, split: Split, move: Move) -> jax.Array:
    def local(z: jax.Array) -> jax.Array:
        return move(z, "triangle")

    return on_split(local, z, splits=(split,), out_split=move.after(split))


def _attended(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array,
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    """Attention along this device's rows.

    Args:
        q: (batch, own rows, columns, heads, head_dim), and so `k` and `v`.
        k: Keys.
        v: Values.
        bias: (batch, own rows, columns, heads).
        mesh_axes: Mesh axes that split the rows.
    """
    # b batch, g devices, t turns, s queries of a device in a turn, N columns.
    batch, rows, size, heads, dim = q.shape
    devices = lax.axis_size(mesh_axes) if mesh_axes else 1
    turns = _turns(rows, size, dim)
    queries = q.reshape(batch, rows, devices, turns, -1, heads, dim)
    queries = jnp.moveaxis(queries, 3, 0).reshape(turns, batch, rows, -1, heads, dim)
    biases = jnp.moveaxis(bias.reshape(batch, turns, -1, size, heads), 1, 0)

    @jax.checkpoint
    def turn(q_bnJhd: jax.Array, bias_bsNh: jax.Array) -> jax.Array:
        if mesh_axes:
            with asked("triangle_bias"):
                bias_bsNh = lax.all_gather(bias_bsNh, mesh_axes, axis=1, tiled=True)
        return _by_lines(q_bnJhd, k, v, bias_bsNh)

    out = lax.map(lambda arrays: turn(*arrays), (queries, biases))
    out = out.reshape(turns, batch, rows, devices, -1, heads, dim)
    return jnp.moveaxis(out, 0, 3).reshape(q.shape)


def _turns(rows: int, size: int, dim: int) -> int:
    """Return the number of gathers of bias, each no larger than the queries."""
    return next(
        turns
        for turns in range(1, rows + 1)
        if rows % turns == 0 and (size <= rows * dim * turns or turns == rows)
    )


def _by_lines(
    q_bnJhd: jax.Array, k: jax.Array, v: jax.Array, bias_bJNh: jax.Array
) -> jax.Array:
    """Attend with some queries of each line, a few lines at a time to bound scores."""
    _, rows, queries, _, dim = q_bnJhd.shape
    at_once = max(
        lines
        for lines in range(1, rows + 1)
        if rows % lines == 0 and (lines * queries <= rows * dim or lines == 1)
    )

    @jax.checkpoint
    def some(given: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v = given
        return _softmax_attention(q, k, v, bias_bJNh)

    return _mapped_over_lines(some, (q_bnJhd, k, v), rows // at_once)


def _mapped_over_lines(
    function: Callable[[tuple[jax.Array, ...]], jax.Array],
    arrays: tuple[jax.Array, ...],
    parts: int,
) -> jax.Array:
    """Map a function over parts of the lines, dim 1 of each array."""
    if parts == 1:
        return function(arrays)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], parts, -1, *x.shape[2:]), 1, 0)

    out = lax.map(function, tuple(map(cut, arrays)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])


def _softmax_attention(
    q_bnJhd: jax.Array, k_bnNhd: jax.Array, v_bnNhd: jax.Array, bias_bJNh: jax.Array
) -> jax.Array:
    scores = jnp.einsum(
        "bnjhd,bnkhd->bnhjk", q_bnJhd, k_bnNhd, preferred_element_type=jnp.float32
    )
    bias = jnp.moveaxis(bias_bJNh.astype(jnp.float32), -1, 1)[:, None]
    scaled = scores * q_bnJhd.shape[-1] ** -0.5 + bias
    shares = jax.nn.softmax(scaled, axis=-1).astype(v_bnNhd.dtype)
    return jnp.einsum("bnhjk,bnkhd->bnjhd", shares, v_bnNhd)
