"""Diffusion Transformers as workloads of the planner (Peebles and Xie 2023)."""

from __future__ import annotations

from meshpar.planner.workload.workload import Workload

_FREQUENCIES = 256
"""Sinusoids of a time, which the first of two matrices reads."""


def dit_workload(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    image: int,
    patch: int,
    channels: int = 4,
    classes: int = 1000,
) -> Workload:
    """The workload of `meshpar.models.dit`: sequences are the patches of an image.

    Args:
        name: What reports call it.
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        image: Height and width of the latents.
        patch: Of a patch.
        channels: Of a latent.
        classes: Labels, beside that of no class.

    Example:
        >>> xl = dit_workload(
        ...     "dit-xl2", layers=28, hidden=1152, heads=16, image=32, patch=2
        ... )
        >>> xl.seq, round(xl.num_parameters / 1e6)
        (256, 675)
    """
    values = patch * patch * channels
    time = (_FREQUENCIES + 1 + hidden + 1) * hidden
    last = 2 * hidden * (hidden + 1)
    biases = hidden + values
    return Workload(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=values,
        seq=(image // patch) ** 2,
        biases=True,
        causal=False,
        modulations=6,
        other_end_parameters=(classes + 1) * hidden + time + last + biases,
        logits_bytes=0,
    )


def _imagenet(layers: int, hidden: int, heads: int) -> dict[str, int]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads}
    return {**sizes, "image": 32, "patch": 2}


_SIZES = {
    "tiny-dit": {
        "layers": 4,
        "hidden": 128,
        "heads": 8,
        "image": 8,
        "patch": 2,
        "channels": 1,
        "classes": 10,
    },
    "dit-s2": _imagenet(12, 384, 6),
    "dit-b2": _imagenet(12, 768, 12),
    "dit-l2": _imagenet(24, 1024, 16),
    "dit-xl2": _imagenet(28, 1152, 16),
    "dit-12b": {"layers": 32, "hidden": 4608, "heads": 36, "image": 256, "patch": 2},
}

DIT_SHAPES = {name: dit_workload(name, **sizes) for name, sizes in _SIZES.items()}
"""The presets of `meshpar.models.dit`, and their sizes (its module says where from)."""
