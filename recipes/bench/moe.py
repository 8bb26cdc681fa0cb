"""Compare routed experts with one device and with a hand-written exchange.

    python -m recipes.bench.moe --devices 8 --tokens 2048

Forward and gradients of one layer of experts in fp32, the same tokens in all: on one
device, split over `expert`, and as one writes it by hand with `jax.shard_map` (buffers
of a capacity for each expert, one all-to-all there and back, one batched matmul, JAX's
derivative). The load is even, so that nobody drops a token. Programs run in turn;
medians of the rounds; and the largest difference of a gradient from one device's, over
its largest value. Virtual CPU devices share the cores: the times say how much work a
method does, and nothing of a network.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshpar import Layout, Scope, default_rules, emulate, make_mesh
from meshpar.cli.parsing import positive

EXPERTS, TOP_K = 8, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.moe")
    parser.add_argument(
        "--devices", type=positive, default=8, help="virtual CPU devices"
    )
    parser.add_argument(
        "--tokens", type=positive, default=2048, help="total number of tokens"
    )
    parser.add_argument("--embed", type=positive, default=256)
    parser.add_argument(
        "--hidden", type=positive, default=512, help="hidden size of an expert"
    )
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args(argv)
    if args.tokens % EXPERTS:
        parser.error(
            f"--tokens {args.tokens}: must be a multiple of {EXPERTS}, as many for "
            "each device and expert"
        )
    emulate(args.devices)
    arrays = _arrays(args.tokens, args.embed, args.hidden)
    degrees = [n for n in (1, 2, 4, 8) if n <= args.devices]
    programs = {f"expert={n}": _compiled(n, _routed, arrays) for n in degrees}
    most = degrees[-1]
    programs[f"by hand, {most} devices"] = _compiled(most, _by_hand, arrays)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.rounds + 1):
        for name, program in programs.items():
            times[name].append(_seconds(program, arrays))
    print("| program | ms | temporary MB of a device | largest difference |")
    print("|---|---|---|---|")
    first = _gradients(programs["expert=1"], arrays)
    for name, program in programs.items():
        found = _gradients(program, arrays)
        apart = max(map(_apart, found, first))
        milliseconds = 1e3 * statistics.median(times[name][1:])
        megabytes = program.memory_analysis().temp_size_in_bytes / 1e6
        print(f"| `{name}` | {milliseconds:.0f} | {megabytes:.1f} | {apart:.0e} |")
    return 0


def _arrays(tokens: int, embed: int, hidden: int) -> tuple:
    import numpy as np

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32) * 0.05

    # Token i goes to experts i and i + 1: as many to each.
    chosen = (np.arange(tokens)[:, None] + np.arange(TOP_K)) % EXPERTS
    return (
        normal(EXPERTS, tokens // EXPERTS, embed),
        chosen.reshape(EXPERTS, -1, TOP_K).astype(np.int32),
        np.full((EXPERTS, tokens // EXPERTS, TOP_K), 1 / TOP_K, np.float32),
        normal(EXPERTS, embed, 2, hidden),
        normal(EXPERTS, hidden, embed),
    )


def _compiled(degree: int, method: Callable[..., Any], arrays: tuple) -> Any:
    """Gradients of the experts over so many devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    layout = Layout(expert=degree)
    mesh = make_mesh(layout, jax.devices()[:degree])
    axes = ("expert",) if degree > 1 else ()
    scope = Scope(rules=default_rules(layout), batch_axes=axes)

    def local(x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        def loss(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
            y = method(scope, degree, x, chosen, weights, gate_up, down)
            return jnp.sum(y * y)

        return jax.grad(loss, (0, 1, 2, 3))(x, weights, gate_up, down)

    split = PartitionSpec("expert")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    where = NamedSharding(mesh, split)
    with jax.set_mesh(mesh):
        return jax.jit(mapped, in_shardings=where).lower(*arrays).compile()


def _routed(scope: Scope, degree: int, *arrays: Any) -> Any:
    from meshpar.parallel.expert.experts import routed_mlp

    return routed_mlp(*arrays, scope, num_experts=EXPERTS)


def _by_hand(scope: Scope, degree: int, *arrays: Any) -> Any:
    import jax
    import jax.numpy as jnp
    from jax import lax

    x, chosen, weights, gate_up, down = arrays
    x, chosen, weights = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights))
    capacity = math.ceil(1.25 * chosen.size / EXPERTS)
    hits = jax.nn.one_hot(chosen.reshape(-1), EXPERTS, dtype=jnp.int32)
    place = ((jnp.cumsum(hits, 0) - 1) * hits).sum(-1)
    at = jnp.where(place < capacity, place, capacity)
    rows = jnp.zeros((EXPERTS, capacity + 1, x.shape[-1]))
    rows = rows.at[chosen.reshape(-1), at].set(jnp.repeat(x, TOP_K, 0))[:, :capacity]
    move = functools.partial(lax.all_to_all, axis_name="expert", tiled=True)
    rows = move(rows, split_axis=0, concat_axis=1)
    both = jnp.einsum("ecd,edpf->ecpf", rows, gate_up)
    hidden = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    out = jnp.einsum("ecf,efd->ecd", hidden, down)
    out = move(out, split_axis=1, concat_axis=0)
    found = out.at[chosen.reshape(-1), at].get(mode="fill", fill_value=0)
    return (found.reshape(*chosen.shape, -1) * weights[..., None]).sum(1)


def _seconds(program: Any, arrays: tuple) -> float:
    import jax

    given = jax.device_put(arrays, program.input_shardings[0])
    start = time.perf_counter()
    jax.block_until_ready(program(*given))
    return time.perf_counter() - start


def _gradients(program: Any, arrays: tuple) -> list[Any]:
    import jax

    given = jax.device_put(arrays, program.input_shardings[0])
    return list(jax.device_get(program(*given)))


def _apart(one: Any, other: Any) -> float:
    return float(abs(one - other).max() / abs(other).max())


if __name__ == "__main__":
    sys.exit(main())
