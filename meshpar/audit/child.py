"""Compiles one exported function for an absent target: `python -m meshpar.audit.child`.

Started by `targets.compile_for`, never by hand; the folder holds the request.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from meshpar.audit.memory import MemoryUse
from meshpar.audit.target import Target
from meshpar.hardware.platforms import PLATFORMS
from meshpar.layout import Layout
from meshpar.machine.emulate import emulate
from meshpar.machine.mesh import make_mesh
from meshpar.machine.topology import Topology

_PRINTING = (
    "--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_call"
)
_PRINTED = "*.jit_call.*.after_optimizations.txt"
_MEMORY_USE = "*.jit_call.*.after_optimizations-memory-usage-report.txt"
_COMPILER_NAMES = {"v7x": "tpu7x"}
"""Chip of a target -> libtpu's name, where it has another."""

_DOES_NOT_FIT = ("RESOURCE_EXHAUSTED", "out of memory", "exceeds the limit")


def main(folder: Path) -> None:
    """Read `request.json` and `program.bin`; write `answer.json`, `program.txt`."""
    request = json.loads((folder / "request.json").read_text())
    # As `report.sources_in_cache_key`.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    answer: dict[str, Any] = {"problem": "", "memory": None}
    platform = Target.parse(request["target"]).platform
    if PLATFORMS[platform].has_own_xla:
        # libtpu reads XLA_FLAGS when it is loaded, and aborts on one that it does not
        # know: what was set is for jaxlib, whose XLA is another.
        os.environ["XLA_FLAGS"] = _PRINTING.format(folder=folder)
    exported = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    mesh = _mesh(request)
    try:
        compiled = _compile(exported, mesh, request)
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in _DOES_NOT_FIT):
            raise
        answer["problem"] = f"does not fit: {' '.join(str(error).split())[:400]}"
    else:
        printed = _last_printed(folder, _MEMORY_USE)
        answer["memory"] = asdict(MemoryUse.from_compiled(compiled, platform, printed))
        (folder / "program.txt").write_text(program_text(compiled, folder))
    (folder / "answer.json").write_text(json.dumps(answer))


def program_text(compiled: jax.stages.Compiled, folder: Path) -> str:
    """Return the compiled program, as jaxlib or else the compiler printed it.

    libtpu is newer than jaxlib, and may have used instructions that jaxlib cannot read.
    """
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        printed = _last_printed(folder, _PRINTED)
        if not printed:
            raise
        return printed


def _last_printed(folder: Path, pattern: str) -> str:
    """Return the compiler's last file of such a name, or an empty text."""
    printed = sorted(folder.glob(pattern))
    return printed[-1].read_text() if printed else ""


def _mesh(request: dict[str, Any]) -> Mesh:
    target, sizes = Target.parse(request["target"]), request["mesh_shape"]
    devices = _devices(target)
    if request["is_layout"]:
        topology = Topology(hosts=1, devices_per_host=len(devices))
        return make_mesh(Layout(**sizes), devices, topology=topology)
    return Mesh(
        np.array(devices).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=tuple(AxisType[name] for name in request["axis_types"]),
    )


def _devices(target: Target) -> list[Any]:
    shape = "x".join(map(str, target.shape))
    platform = PLATFORMS[target.platform]
    if platform.is_host:
        return emulate(target.num_devices)
    if platform.has_torus:
        name = f"{_COMPILER_NAMES.get(target.chip, target.chip)}:{shape}"
        # A v4 chip's two cores are one device in practice, but not by default here.
        options = {"chip_config_name": "megacore"} if target.chip == "v4" else {}
        topology = topologies.get_topology_desc(name, platform=platform.name, **options)
        return list(topology.devices)
    files = importlib.resources.files("meshpar.audit") / "gpu_targets"
    config = (files / f"{target.chip}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform=platform.export_name, target_config=config, topology=f"1x{shape}"
    )
    return list(topology.devices)


def _compile(
    exported: export.Exported, mesh: Mesh, request: dict[str, Any]
) -> jax.stages.Compiled:
    shardings = exported.in_shardings_jax(mesh)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    jitted = jax.jit(exported.call, donate_argnums=tuple(request["donated"]))
    # Arguments without a sharding do not say how many devices there are.
    with jax.set_mesh(mesh):
        return jitted.lower(*arguments).compile(request["compiler_options"] or None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
