"""Compare embedding tables with the dense gradient of the same model.

    python -m recipes.bench.tables
    python -m recipes.bench.tables --rows 100000 --tables 4 --examples 2048

The same small DLRM, the same Zipf-distributed ids and first values, row-wise Adagrad in
both: with `meshpar.tables`, and as GSPMD makes it of tables that are parameters, split
by rows over all devices, whose gradients are as large as they. One runs after the
other; medians of the rounds; and how far the losses of a step are apart at most.
Virtual CPU devices share the cores: times say how much work a method does, and nothing
of a network; beside other programs only the CPU time does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar import embedding_tables, emulate, make_train_step
from meshpar.cli.parsing import positive

RATE, EPSILON, MODEL_RATE = 0.05, 1e-8, 0.01
NUMBERS = 4
Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A way to train.

    Args:
        step: (state, batch on the devices) -> the next state, and the loss.
        state: The first.
        temp_bytes: Of the program, a device.
    """

    step: Callable[[Any, Batch], tuple[Any, Any]]
    state: Any
    temp_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.tables")
    parser.add_argument("--devices", type=positive, default=8)
    parser.add_argument("--tables", type=positive, default=2)
    parser.add_argument(
        "--rows", type=positive, default=1_000_000, help="rows per table"
    )
    parser.add_argument("--dim", type=positive, default=64)
    parser.add_argument(
        "--examples", type=positive, default=1024, help="examples per step"
    )
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args(argv)
    if args.rows % args.devices:
        parser.error(
            f"--rows {args.rows} do not divide over --devices {args.devices}, as the "
            f"dense tables' must; give a multiple of {args.devices}"
        )
    emulate(args.devices)
    step, batches = _step(args), [_batch(args, at) for at in range(args.rounds + 1)]
    print(step.placements)
    contestants = {"tables": _sparse(step, batches[0]), "dense": _dense(step, batches)}
    times, losses = _run(contestants, [step.place(batch) for batch in batches])
    print("| gradient of the tables | ms a step | CPU ms | temporary MB of a device |")
    print("|---|---|---|---|")
    medians = {
        name: [statistics.median(column) for column in zip(*of[1:], strict=True)]
        for name, of in times.items()
    }
    for name, one in contestants.items():
        wall, cpu = (f"{1e3 * seconds:.0f}" for seconds in medians[name])
        print(f"| {name} | {wall} | {cpu} | {one.temp_bytes / 1e6:.1f} |")
    pairs = zip(losses["tables"], losses["dense"], strict=True)
    apart = max(abs(one - other) for one, other in pairs)
    both = zip(medians["dense"], medians["tables"], strict=True)
    wall, cpu = (f"{slow / fast:.1f}" for slow, fast in both)
    print(
        f"{wall} times as fast, {cpu} times less CPU time; losses at most "
        f"{apart:.0e} apart"
    )
    return 0


def _step(args: argparse.Namespace) -> Any:
    """The model's step, with tables."""
    import optax

    from meshpar.models.presets import build
    from meshpar.tables import RowwiseAdagrad, Table, with_tables

    sizes = {"features": args.tables, "dim": args.dim, "numbers": NUMBERS}
    model = build("tiny-dlrm", **sizes, bottom=(args.dim,))
    dense = make_train_step(model, optax.sgd(MODEL_RATE), f"data={args.devices}")
    tables = [
        Table(name=f"id{at}", rows=args.rows, dim=args.dim) for at in range(args.tables)
    ]
    optimizer = RowwiseAdagrad(RATE, epsilon=EPSILON)
    made = embedding_tables(tables, optimizer, placement="row_wise")
    return with_tables(dense, made)


def _batch(args: argparse.Namespace, number: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(number)
    batch: dict[str, Any] = {
        f"id{at}": ((rng.zipf(1.2, (args.examples, 1)) - 1) % args.rows).astype("int32")
        for at in range(args.tables)
    }
    numbers = rng.normal(size=(args.examples, NUMBERS)).astype(np.float32)
    clicks = rng.integers(0, 2, args.examples).astype(np.float32)
    return {**batch, "numbers": numbers, "clicks": clicks}


def _run(
    contestants: Mapping[str, Contestant], batches: Sequence[Batch]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[float]]]:
    """Seconds, CPU seconds and loss of every step, one contestant after the other.

    In turn, each would pay for the other's temporary memory, which goes back to the
    machine after a step's results are there.
    """
    import jax

    states = {name: one.state for name, one in contestants.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    for name, one in contestants.items():
        for batch in batches:
            began, worked = time.perf_counter(), time.process_time()
            states[name], loss = one.step(states[name], batch)
            losses[name].append(float(loss))
            # The loss is there before the tables are.
            jax.block_until_ready(states[name])
            spent = time.perf_counter() - began, time.process_time() - worked
            times[name].append(spent)
    return times, losses


def _sparse(step: Any, batch: Batch) -> Contestant:
    compiled = step.compile(batch)

    def run(state: Any, batch: Batch) -> tuple[Any, Any]:
        state, metrics = compiled(state, batch)
        return state, metrics["loss"]

    memory = compiled.memory_analysis()
    return Contestant(
        step=run, state=step.init(0), temp_bytes=memory.temp_size_in_bytes
    )


def _dense(step: Any, batches: Sequence[Batch]) -> Contestant:
    """The same model with its tables among the parameters, by GSPMD."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from meshpar.model.tracing import loss as loss_of

    model, mesh = step.dense.model, step.mesh
    rows, whole = (NamedSharding(mesh, PartitionSpec(*on)) for on in (("data",), ()))
    names = list(step.tables.features)

    def update(state: Any, batch: Batch) -> tuple[Any, Any]:
        def loss(params: Any, tables: Any) -> Any:
            vectors = [tables[name][batch[name][:, 0]] for name in names]
            return loss_of(model, params, {**batch, "embedded": jnp.stack(vectors, 1)})

        params, tables, sums = state
        found, (of_params, of_tables) = jax.value_and_grad(loss, (0, 1))(params, tables)
        params = jax.tree.map(lambda p, g: p - MODEL_RATE * g, params, of_params)
        sums = jax.tree.map(lambda s, g: s + jnp.mean(g * g, axis=1), sums, of_tables)
        tables = jax.tree.map(
            lambda t, s, g: t - RATE * g / (jnp.sqrt(s) + EPSILON)[:, None],
            tables,
            sums,
            of_tables,
        )
        return (params, tables, sums), found

    first = step.init(0)
    tables = {
        name: jax.device_put(values["rows"], rows)
        for name, values in step.host_tables(first).items()
    }
    sums = {name: jnp.zeros(len(tables[name]), device=rows) for name in names}
    params = jax.device_put(jax.tree.map(np.asarray, first.params), whole)
    state = params, tables, sums
    lying = jax.tree.map(lambda array: array.sharding, state)
    program = jax.jit(update, out_shardings=(lying, whole), donate_argnums=0)
    compiled = program.lower(state, step.place(batches[0])).compile()
    memory = compiled.memory_analysis()
    return Contestant(step=compiled, state=state, temp_bytes=memory.temp_size_in_bytes)


if __name__ == "__main__":
    sys.exit(main())
