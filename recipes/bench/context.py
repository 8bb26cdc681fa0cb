"""Compare time and memory of attention over a split sequence, by method.

    python -m recipes.bench.context
    python -m recipes.bench.context --seq 16384 --context 8

Values and gradients of causal attention with grouped heads, on emulated CPU devices:
ring, gather, Ulysses, and both degrees at once beside one device, and beside a
hand-written `shard_map` that gathers keys and values and builds all scores of its
queries. All must agree in values and gradients; then they run in turns. The same work
is done on the same cores by all, but for the scores that a causal mask hides, which the
hand-written one makes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import meshpar
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.context.attention import shard_attention
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.sequence import token_order
from meshpar.recipes.bench.conditions import conditions, turn_ynn_off

METHODS = ("ring", "allgather", "ulysses")
"""And where `--context` is even and above 2, Ulysses in pairs and a ring across."""
_TOLERANCE = 1e-5


def main() -> None:
    """Measures every way and prints one table."""
    args = _arguments()
    turn_ynn_off()
    meshpar.emulate(8)
    arrays = _arrays(args)
    programs = {"one device": _one_device(), "hand-written gather": _by_hand(args)}
    programs |= {method: _method(method, args) for method in _methods(args)}
    compiled = {
        name: jax.jit(run).lower(*arrays).compile() for name, run in programs.items()
    }
    _agree({name: jax.device_get(run(*arrays)) for name, run in compiled.items()})
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(args.runs + 1):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - start)
    print(
        conditions(
            "recipes.bench.context", args.context, args.sizes, f"{args.runs} runs"
        )
    )
    Console(width=None if sys.stdout.isatty() else 100).print(_table(compiled, seconds))


def _methods(args: argparse.Namespace) -> tuple[str, ...]:
    pairs, odd = divmod(args.context, 2)
    return METHODS if odd or pairs < 2 else (*METHODS, f"ulysses:2+ring:{pairs}")


def _one_device() -> Any:
    return _gradients(
        lambda q, k, v: shard_attention(q, k, v, mask=Mask(), platform="cpu")
    )


def _method(method: str, args: argparse.Namespace) -> Any:
    layout = meshpar.Layout(context=args.context, attention=method)
    order = cast(TokenOrder, token_order(layout))

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = {"order": order, "rank": order.rank(), "platform": "cpu"}
        return shard_attention(q, k, v, mask=Mask(), **options)

    split = _split(local, args)
    size = args.seq // args.context
    ranks = [order.positions(size, rank) for rank in range(args.context)]
    places = np.concatenate(ranks)

    def run(*arrays: jax.Array) -> jax.Array:
        return split(*(x[:, places] for x in arrays))[:, np.argsort(places)]

    return _gradients(run)


def _by_hand(args: argparse.Namespace) -> Any:
    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
        first = lax.axis_index("context") * q.shape[1]
        seen = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])

    return _gradients(_split(local, args))


def _split(local: Any, args: argparse.Namespace) -> Any:
    mesh = Mesh(np.array(jax.devices()[: args.context]), ("context",))
    spec = P(None, "context")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )


def _gradients(run: Any) -> Any:
    def values(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple:
        y, vjp = jax.vjp(run, q, k, v)
        return y, *vjp(dy)

    return values


def _arrays(args: argparse.Namespace) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    heads = args.heads, args.kv_heads, args.kv_heads, args.heads
    return [
        jnp.asarray(rng.normal(size=(1, args.seq, num, args.head_dim)), jnp.float32)
        for num in heads
    ]


def _agree(found: dict[str, tuple]) -> None:
    wanted = found["one device"]
    for name, arrays in found.items():
        for got, want in zip(arrays, wanted, strict=True):
            error = np.abs(got - want).max() / np.abs(want).max()
            if not error <= _TOLERANCE:  # NaN included
                sys.exit(f"{name} differs by {error:.1e}, more than {_TOLERANCE}")


def _table(compiled: dict[str, Any], seconds: dict[str, list[float]]) -> Table:
    table = Table(title="Attention, values and gradients")
    for header in ("", "s", "of one device", "temp MB a device", "of one device"):
        table.add_column(header, justify="right" if header else "left")
    temp = {
        name: run.memory_analysis().temp_size_in_bytes for name, run in compiled.items()
    }
    took = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    for name in compiled:
        table.add_row(
            name,
            f"{took[name]:.3f}",
            f"{took[name] / took['one device']:.2f}",
            f"{temp[name] / 1e6:.1f}",
            f"{temp[name] / temp['one device']:.2f}",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = dict(seq=8192, heads=8, kv_heads=4, head_dim=64)
    for name, default in {**sizes, "context": 4, "runs": 3}.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    args.sizes = {name: getattr(args, name) for name in (*sizes, "context")}
    return args


if __name__ == "__main__":
    main()
