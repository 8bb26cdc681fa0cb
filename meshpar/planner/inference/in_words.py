"""Text of an inference estimate."""

from __future__ import annotations

from collections.abc import Sequence

from meshpar.planner.inference.estimate import InferenceEstimate


def in_words(found: InferenceEstimate) -> Sequence[str]:
    """Return lines of text: memory, decode, prefill, and a table of slots."""
    device = found.cluster.device
    gigabytes = [
        f"{name} {value / 1e9:.2f} GB"
        for name, value in (
            ("parameters", found.parameter_bytes),
            ("cache", found.cache_bytes),
            ("other", found.other_bytes),
        )
    ]
    rows = [
        f"  {one.slots:>7} slots {1e3 * one.decode_s:9.2f} ms a token "
        f"{one.tokens_per_s:12,.0f} tokens/s"
        for one in found.table()
    ]
    return [
        f"{found.workload.name} on {found.cluster.text}, layout {found.layout}: "
        f"{found.slots} slots of {found.seq} tokens",
        f"memory {found.total_bytes / 1e9:.2f} of {device.memory_bytes / 1e9:.2f} GB: "
        f"{'fits' if found.fits else 'does not fit'}",
        f"  {', '.join(gigabytes)}",
        f"decode {1e3 * found.decode_s:.2f} ms a token, bound by {found.bound}; "
        f"{found.tokens_per_s:,.0f} tokens/s",
        f"prefill {1e3 * found.prefill_s:.1f} ms for {found.prompt} tokens",
        "against the number of slots, all of them full:",
        *rows,
    ]
