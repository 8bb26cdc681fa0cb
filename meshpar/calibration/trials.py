"""Trials: kernels, collectives and whole steps, timed on all devices at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.collective_cost import all_gather_s, all_reduce_s, send_s

if TYPE_CHECKING:
    from meshpar.train.step import TrainStep

AXES = ("group", "member")
"""The mesh of a trial: groups of devices, which work at the same time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A program to time.

    Args:
        name: Its name in reports.
        run: Runs the body `repeats` times and waits for the end.
        repeats: Times that one call runs the body.
    """

    name: str
    run: Callable[[], object]
    repeats: int


def trial_mesh(devices: Sequence[jax.Device], members: int) -> Mesh:
    """Return a mesh of groups of `members` devices each, neighbours together."""
    groups = len(devices) // members
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((groups, members), AXES, axis_types=kinds, devices=devices)


def trial(
    name: str,
    mesh: Mesh,
    body: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    repeats: int,
) -> Trial:
    """Compile a trial of `body`, whose result is its next first argument.

    Args:
        name: Its name in reports.
        mesh: From `trial_mesh`.
        body: Function of one device's arrays.
        arrays: These arrays, the same on every device.
        repeats: Times that one run calls the body, each after the one before.
    """
    spec = PartitionSpec(AXES)
    lying = NamedSharding(mesh, spec)

    def on_device(first: jax.Array, *others: jax.Array) -> jax.Array:
        own = [other[0] for other in others]
        step = lambda _, value: body(value, *own)  # noqa: E731
        return lax.fori_loop(0, repeats, step, first[0])[None]

    specs = (spec,) * len(arrays)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=spec)
    whole = [
        jax.device_put(jnp.broadcast_to(array, (mesh.size, *array.shape)), lying)
        for array in arrays
    ]
    compiled = jax.jit(program).lower(*whole).compile()
    return Trial(
        name=name,
        run=lambda: jax.block_until_ready(compiled(*whole)),
        repeats=repeats,
    )


def seconds(trials: Sequence[Trial], rounds: int) -> list[float]:
    """Return each body's median seconds; rounds interleave all trials."""
    for each in trials:
        each.run()
    taken: list[list[float]] = [[] for _ in trials]
    for _ in range(rounds):
        for each, times in zip(trials, taken, strict=True):
            start = time.perf_counter()
            each.run()
            times.append((time.perf_counter() - start) / each.repeats)
    return [statistics.median(times) for times in taken]


TINY_OPS = 16
"""Kernels of one round of the launch trial."""

_KIB, _MIB = 2**10, 2**20
_ROW = 512
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """Sizes worth measuring on a kind of device.

    Args:
        matmuls: (rows, inner, columns) of each shape.
        stream_bytes: Bytes that elementwise kernels read and write, smallest first.
        flops: FLOPs of one run of a matmul trial, about.
        exchange_bytes: Bytes of the arrays that collectives exchange.
    """

    matmuls: tuple[tuple[int, int, int], ...]
    stream_bytes: tuple[int, ...]
    flops: float
    exchange_bytes: tuple[int, ...]


# A CPU's devices share its cores and caches; what an accelerator streams has to be
# larger than its caches (50 MB of L2 on an H100).
CPU_SIZES = KernelSizes(
    matmuls=(
        (64, 64, 256),
        (256, 128, 384),
        (256, 256, 1024),
        (512, 256, 256),
        (512, 512, 1536),
    ),
    stream_bytes=(_MIB // 4, _MIB, 4 * _MIB),
    flops=4e8,
    exchange_bytes=(16 * _KIB, 256 * _KIB, 2048 * _KIB),
)
ACCELERATOR_SIZES = KernelSizes(
    matmuls=(
        (1024, 1024, 4096),
        (4096, 2048, 8192),
        (8192, 4096, 14_336),
        (8192, 8192, 8192),
        (16_384, 8192, 28_672),
    ),
    stream_bytes=(128 * _MIB, 512 * _MIB),
    flops=2e14,
    exchange_bytes=(1024 * _KIB, 16_384 * _KIB, 262_144 * _KIB),
)


def matmul_trial(
    devices: Sequence[jax.Device],
    shape: tuple[int, int, int],
    dtype: str,
    sizes: KernelSizes,
) -> Trial:
    """Time a matmul of that shape and one back; half of it is one matmul's time."""
    rows, inner, columns = shape
    kind = _DTYPES[dtype]
    there = jnp.full((inner, columns), 1 / inner, kind)
    back = jnp.full((columns, inner), 1 / columns, kind)
    flops = 4 * rows * inner * columns
    return trial(
        f"matmul {rows} x {inner} x {columns} {dtype}",
        trial_mesh(devices, 1),
        lambda x, there, back: (x @ there) @ back,
        [jnp.ones((rows, inner), kind), there, back],
        repeats=max(2, min(512, round(sizes.flops / flops))),
    )


def stream_trial(devices: Sequence[jax.Device], num_bytes: int) -> Trial:
    """Time a kernel that reads half of so many bytes and writes the other half."""
    values = num_bytes // 2 // 4
    return trial(
        f"stream of {num_bytes / _MIB:g} MiB",
        trial_mesh(devices, 1),
        lambda x: x * 0.5 + 0.5,
        [jnp.ones(values, jnp.float32)],
        repeats=max(8, min(256, 64 * _MIB // num_bytes)),
    )


def elementwise_trials(devices: Sequence[jax.Device], num_bytes: int) -> list[Trial]:
    """Time the elementwise kernels of a block, each of so many bytes as a stream."""

    def norm(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    rows = num_bytes // 2 // 4 // _ROW
    return [
        trial(
            f"{name} of {num_bytes / _MIB:g} MiB",
            trial_mesh(devices, 1),
            kernel,
            [jnp.ones((rows, _ROW), jnp.float32)],
            repeats=max(4, min(64, 16 * _MIB // num_bytes)),
        )
        for name, kernel in (
            ("norm", norm),
            ("softmax", jax.nn.softmax),
            ("activation", jax.nn.silu),
        )
    ]


def launch_trial(devices: Sequence[jax.Device]) -> Trial:
    """Time `TINY_OPS` kernels of next to no work, one behind the other."""

    def tiny(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(TINY_OPS):
            x = x @ w
        return x

    small = jnp.full((8, 8), 1 / 8)
    mesh = trial_mesh(devices, 1)
    return trial("tiny kernels", mesh, tiny, [small, small], repeats=64)


def attention_trial(devices: Sequence[jax.Device], head_dim: int, seq: int) -> Trial:
    """Time cuDNN's causal attention of one sequence, 2048 wide, in bf16."""
    heads = 2048 // head_dim
    query = jnp.ones((1, seq, heads, head_dim), jnp.bfloat16)
    return trial(
        f"attention of {heads} heads of {head_dim}, {seq} tokens",
        trial_mesh(devices, 1),
        lambda q, k: jax.nn.dot_product_attention(
            q, k, k, is_causal=True, implementation="cudnn"
        ),
        [query, query],
        repeats=32,
    )


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective to time.

    Args:
        kind: `all-reduce`; `there and back`, a reduce-scatter and an all-gather; or
            `collective-permute` around the group.
        members: Devices of a group.
        payload_bytes: Bytes of the whole array.
    """

    kind: str
    members: int
    payload_bytes: int

    @property
    def name(self) -> str:
        """Name in reports."""
        kib = self.payload_bytes / _KIB
        return f"{self.kind} of {kib:g} KiB over {self.members} devices"

    def expected_s(self, link: Link) -> float:
        """Time by the planner's formulas."""
        if self.kind == "all-reduce":
            return all_reduce_s(self.payload_bytes, self.members, link)
        if self.kind == "collective-permute":
            return send_s(self.payload_bytes, link)
        return 2 * all_gather_s(self.payload_bytes, self.members, link)


def exchanges(num_devices: int, sizes: Sequence[int]) -> list[Exchange]:
    """List every kind and size over groups of 2, 4, 8 and all devices."""
    members = [n for n in (2, 4, 8) if n <= num_devices and num_devices % n == 0]
    if num_devices > 1 and num_devices not in members:
        members.append(num_devices)
    return [
        Exchange(kind=kind, members=count, payload_bytes=size)
        for kind in _BODIES
        for count in members
        for size in sizes
    ]


def exchange_trial(devices: Sequence[jax.Device], exchange: Exchange) -> Trial:
    """Time one collective, in all groups at once."""
    members = exchange.members
    values = exchange.payload_bytes // 4 // members * members
    return trial(
        exchange.name,
        trial_mesh(devices, members),
        _BODIES[exchange.kind],
        [jnp.ones(values, jnp.float32)],
        repeats=8,
    )


def _around(x: jax.Array) -> jax.Array:
    members = lax.axis_size("member")
    to_next = [(i, (i + 1) % members) for i in range(members)]
    return lax.ppermute(x, "member", to_next)


_BODIES = {
    "all-reduce": lambda x: lax.pcast(
        lax.psum(x, "member") * 0.5, "member", to="varying"
    ),
    "there and back": lambda x: lax.all_gather(
        lax.psum_scatter(x, "member", tiled=True) * 0.5, "member", tiled=True
    ),
    "collective-permute": _around,
}


def step_trial(step: TrainStep, batch: Mapping[str, Any], *, steps: int) -> float:
    """Return the median seconds of a step, after one that compiles and one more.

    Args:
        step: A step on devices that are present.
        batch: The batch of every step.
        steps: Steps that are timed.
    """
    state = step.init(seed=0)
    taken = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        taken.append(time.perf_counter() - start)
        del metrics
    return statistics.median(taken[2:])
