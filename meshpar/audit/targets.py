"""Hardware that is not there, and the real compiler for it, in a process of its own.

The function is lowered here, written as a portable `jax.export` artifact, and compiled
in a child process: a compiler that aborts, hangs or eats all memory ends the child.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from jax import export

from meshpar.audit.memory import MemoryUse
from meshpar.audit.subject import Subject
from meshpar.audit.target import Target
from meshpar.errors import InputError, install_extra
from meshpar.hardware.platforms import PLATFORMS, SPARSE_CORE_OFFLOAD
from meshpar.machine.mesh import use_mesh

_SPARSE_CORE = re.compile(r"\b(all-gather|all-reduce|reduce-scatter)\b.*'sc_tpu\.")

_POLL_S = 0.2
_REFUSED_CALL = re.compile(
    r"custom calls whose targets .*?custom_call @([\w.$]+)", re.S
)

# Exporting refuses calls that a later version might not know; ours is compiled at once.
_CUSTOM_CALLS = (
    "ragged_all_to_all",
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
)


class TargetError(InputError):
    """The compiler for an absent target is not installed, or failed."""


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """The program that a compiler made, or why there is none.

    Args:
        text: The program.
        memory: Bytes per device.
        problem: Why there is none, such as that it does not fit; else empty.
    """

    text: str = ""
    memory: MemoryUse | None = None
    problem: str = ""


def compile_for(
    target: Target, subject: Subject, *, timeout_s: float, memory_bytes: int
) -> CompiledProgram:
    """Compile for a target with the target's own compiler, in a child process.

    Args:
        target: Hardware that need not be there.
        subject: What to compile, on a mesh of as many devices.
        timeout_s: Seconds that the child process may take.
        memory_bytes: Memory that it may take.

    Raises:
        InputError: The mesh has another number of devices.
        TargetError: The extra `aot` is not installed, or the compiler failed.
    """
    _check(target, subject)
    with tempfile.TemporaryDirectory(prefix="meshpar-") as name:
        folder = Path(name)
        donated = _export(target, subject, folder / "program.bin")
        request = {
            "target": str(target),
            "mesh_shape": subject.mesh_shape,
            # As `jax.export` has them: a program is called on no other.
            "axis_types": [kind.name for kind in subject.mesh.axis_types],
            "is_layout": subject.layout is not None,
            "donated": donated,
            "compiler_options": dict(subject.compiler_options),
        }
        (folder / "request.json").write_text(json.dumps(request))
        failure = _run(folder, timeout_s=timeout_s, memory_bytes=memory_bytes)
        answer = folder / "answer.json"
        if not answer.exists():
            raise TargetError(
                f"the compiler for {target} failed: {failure}{_way_out(str(failure))}",
                key=failure.key,
            )
        found = json.loads(answer.read_text())
        if found["problem"]:
            return CompiledProgram(problem=found["problem"])
        text = (folder / "program.txt").read_text()
        return CompiledProgram(text=text, memory=MemoryUse(**found["memory"]))


def _check(target: Target, subject: Subject) -> None:
    if subject.mesh.size != target.num_devices:
        raise InputError(
            f"the mesh has {subject.mesh.size} devices, but target {target} has "
            f"{target.num_devices}; change the layout or the target",
            key="audit.target_devices_mismatch",
        )
    missing = PLATFORMS[target.platform].missing_modules
    if missing:
        raise TargetError(
            f"target {target} needs {' and '.join(missing)}: {install_extra('aot')}",
            key="audit.missing_package",
        )


def _export(target: Target, subject: Subject, path: Path) -> tuple[int, ...]:
    """Write the lowered function; return the arguments that it donates."""
    flat = subject.flat()
    exporter = export.export(
        flat.jitted(),
        platforms=[PLATFORMS[target.platform].export_name or target.platform],
        disabled_checks=[
            export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS
        ],
    )
    try:
        with use_mesh(subject.mesh):
            exported = exporter(*flat.leaves)
    except ValueError as error:
        refused = _REFUSED_CALL.search(str(error))
        if not refused:
            raise
        raise TargetError(
            f"target {target}: jax.export refuses the custom call {refused[1]!r}; "
            "audit the program where its devices are, without a target",
            key="audit.refused_custom_call",
        ) from error
    path.write_bytes(exported.serialize())
    return flat.donated


def _run(folder: Path, *, timeout_s: float, memory_bytes: int) -> TargetError:
    """Run the child; return the error to raise if it wrote no answer."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # others may compile for TPUs meanwhile
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # The child imports what this process does, however that came to be.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    environment.pop("MESHPAR_EMULATE", None)
    with (folder / "words.txt").open("w") as words:
        child = subprocess.Popen(
            _child_command(folder),
            stdout=words,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            ending = _wait(child, timeout_s=timeout_s, memory_bytes=memory_bytes)
        finally:
            child.kill()
    said = _last_words((folder / "words.txt").read_text(errors="replace"))
    said = said or f"it ended with status {child.returncode}, without a word"
    return ending or TargetError(said, key="audit.compiler_failed")


def _way_out(words: str) -> str:
    """Return a way out if libtpu cannot compile a collective for its SparseCores."""
    found = _SPARSE_CORE.search(words)
    if found is None:
        return ""
    option = f"{SPARSE_CORE_OFFLOAD}_{found[1].replace('-', '_')}"
    return (
        f"; leave each {found[1]} to the TensorCore: compiler_options="
        f"{{{option!r}: False}} (--compiler-option {option}=false)"
    )


def _child_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "meshpar.audit.child", str(folder)]


def _wait(
    child: subprocess.Popen, *, timeout_s: float, memory_bytes: int
) -> TargetError | None:
    limit = time.monotonic() + timeout_s
    while True:
        try:
            child.wait(_POLL_S)
            return None
        except subprocess.TimeoutExpired:
            used = _resident_bytes(child.pid)
        if time.monotonic() > limit or used > memory_bytes:
            child.kill()
            child.wait()
            if used > memory_bytes:
                return TargetError(
                    f"it took {used:,} bytes, more than the {memory_bytes:,} allowed; "
                    "raise memory_bytes (--memory-gib)",
                    key="audit.compiler_memory_exceeded",
                )
            return TargetError(
                f"it took longer than the {timeout_s:g} s allowed; raise timeout_s "
                "(--timeout)",
                key="audit.compiler_timeout",
            )


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process; 0 if the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") and "]" in line]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (fatal or errors or lines or [""])[-1][:500]
