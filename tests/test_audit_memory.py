"""Memory of a program for a TPU: what its compiler holds against the chip's."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.audit.memory import MemoryUse
from meshpar.audit.report import audit
from tests.test_audit_targets import needs_tpu_compiler

PRINTED = """Memory Space: default (color=0)
Total bytes: 140 (140B)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
Memory Space: vmem (color=1)
Total bytes: 41964032 (40.02MiB)
"""


@pytest.mark.parametrize(
    ("platform", "printed", "reported", "on_host", "temp", "peak"),
    [
        ("tpu", PRINTED, 135, 0, 140 - 110, 140),
        ("tpu", "", 135, 0, 135 - 110, 135),
        ("tpu", "another form of report", 135, 0, 135 - 110, 135),
        ("gpu", PRINTED, 135, 0, 70, 180),
        ("gpu", "", 250, 40, 70, 250 - 40),
        ("cpu", "", 135, 0, 70, 180),
    ],
)
def test_a_device_needs_what_its_compiler_goes_by(
    platform, printed, reported, on_host, temp, peak
):
    sizes = dict(argument=100, output=60, temp=70, alias=50, host_temp=on_host)
    fields = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    stats = types.SimpleNamespace(**fields, peak_memory_in_bytes=reported)
    compiled = types.SimpleNamespace(memory_analysis=lambda: stats)
    found = MemoryUse.from_compiled(compiled, platform, printed)
    assert (found.argument_bytes, found.output_bytes) == (100, 60)
    assert (found.temp_bytes, found.peak_bytes) == (temp, peak)


@needs_tpu_compiler
@pytest.mark.slow
def test_a_program_that_compiles_for_a_chip_takes_no_more_than_the_chip_has():
    """17.7 GB by libtpu's own sum of arguments and temporaries."""
    rows, width, steps = 44_032, 8192, 8

    def stacked(x, weight):
        def body(x, _):
            return jnp.tanh(x @ weight), x

        last, before = lax.scan(body, x, None, length=steps)
        return jnp.sin(before).sum() + last.sum()

    whole = NamedSharding(AbstractMesh((4,), ("data",)), P())
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
        for shape in ((rows, width), (width, width))
    ]
    report = audit(jax.jit(stacked), *arguments, target="tpu:v5e:2x2")
    assert report.fits
    one, available = rows * width * 4, 15.75 * 2**30
    # What is stacked, and an argument and a result of a step besides.
    assert (steps + 2) * one < report.memory.peak_bytes < available
