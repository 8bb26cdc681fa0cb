"""Resume a run on another number of devices, with the same batches.

The global batch stays, and so does the order of the data. The axes that split the batch
take the devices that are there, and microbatches change so that a device still holds no
more examples at once than before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshpar import InputError, Layout
from meshpar.layout import BATCH_AXES, MESH_AXES
from meshpar.recipes.config import RunConfig
from meshpar.train.checkpoint.contents import check_description, saved_steps
from meshpar.train.checkpoint.files import read_run


def fitted(config: RunConfig, num_devices: int, num_processes: int) -> tuple[str, str]:
    """The layout of a resumed run on the devices that are there, and a line of it.

    A layout that is given with other sizes than were asked for before is left as it is:
    what is fitted is the earlier one's, and one with a mesh axis of -1. On as many
    devices as before the microbatches stay as they were cut then.

    Args:
        config: Of the run.
        num_devices: That are there.
        num_processes: Whose they are; of one process some devices may stay idle.

    Returns:
        The layout's line, and what is to be told; empty where nothing changes.

    Raises:
        InputError: The global batch or the layout cannot be shared out so.
    """
    wanted, lines = Layout.parse(config.layout), _layouts_before(config)
    if lines is None:
        return config.layout, ""
    before, asked = lines
    is_open = _is_open(wanted)
    if not is_open:
        named = before if _is_open(asked) else asked
        enough = num_devices >= wanted.num_devices and num_processes == 1
        if wanted.mesh_shape != named.mesh_shape or enough:
            return config.layout, ""
    layout = wanted.resolve(num_devices) if is_open else shared(wanted, num_devices)
    if layout.num_devices == before.num_devices:
        if wanted.microbatches == asked.microbatches:
            count, splits = before.microbatches, before.data_splits
            layout = replace(layout, microbatches=count, data_splits=splits)
        return str(layout), ""
    layout = recut(layout, before, config.global_batch)
    each = config.global_batch // (layout.batch_shards * layout.microbatches)
    told = (
        f"{layout.num_devices} devices instead of {before.num_devices}: layout "
        f"{before} -> {layout}; the global batch stays {config.global_batch} sequences "
        f"in the same order, {each} on a device at once"
    )
    return str(layout), told


def shared(layout: Layout, num_devices: int) -> Layout:
    """The layout on so many devices, which only the batch's axes notice.

    Parts of `data` have even shares then.

    Example:
        >>> str(shared(Layout.parse("data=2,fsdp=4,tensor=2"), 8))
        'fsdp=4,tensor=2'

    Raises:
        InputError: The other axes do not divide them.
    """
    of_model = math.prod(
        size for axis, size in layout.mesh_shape.items() if axis not in BATCH_AXES
    )
    of_batch, rest = divmod(num_devices, of_model * layout.expert)
    if rest or not of_batch:
        raise InputError(
            f"layout {str(layout)!r} needs a multiple of {of_model * layout.expert} "
            f"devices whatever data and fsdp are, but there are {num_devices}; give a "
            "--layout for them",
            key="layout.wrong_device_count",
        )
    fsdp = math.gcd(layout.fsdp, of_batch)
    return replace(layout, data=of_batch // fsdp, fsdp=fsdp, data_splits=())


def recut(layout: Layout, before: Layout, global_batch: int) -> Layout:
    """The layout with the fewest microbatches that are no larger than before.

    Parts of `data` have even shares then.

    Args:
        layout: On the devices that are there.
        before: Whose microbatches fitted into a device.
        global_batch: Sequences of a step.

    Example:
        >>> one, before = Layout.parse("data=1"), Layout.parse("data=4")
        >>> str(recut(one, before, global_batch=16))
        'microbatches=4'

    Raises:
        InputError: The batch does not divide over the layout's devices.
    """
    of_device, rest = divmod(global_batch, layout.batch_shards)
    if rest:
        raise InputError(
            f"the global batch of {global_batch} sequences does not divide over "
            f"{layout.batch_shards} devices of data={layout.data},fsdp={layout.fsdp}"
            f"{f',expert={layout.expert}' if layout.expert > 1 else ''}; start with "
            "another number of devices, or give --layout or --global-batch",
            key="batch.indivisible",
        )
    layout = replace(layout, data_splits=())
    at_once = global_batch // (before.batch_shards * before.microbatches)
    # Interleaved schedules take whole rounds of microbatches.
    step = layout.stage if before.microbatches % layout.stage == 0 else 1
    for number in range(step, of_device + 1, step):
        if of_device % number == 0 and of_device // number <= max(at_once, 1):
            return replace(layout, microbatches=number)
    return replace(layout, microbatches=before.microbatches)


def _is_open(layout: Layout) -> bool:
    """Return True if the axis takes all devices that are left."""
    return any(getattr(layout, mesh_axis) == -1 for mesh_axis in MESH_AXES)


def _layouts_before(config: RunConfig) -> tuple[Layout, Layout] | None:
    """Return the newest checkpoint's layout and the requested one, or None.

    Older checkpoints say only the first.
    """
    description = newest_description(config.folder / "checkpoints")
    line = description.get("layout")
    if not config.resume or not isinstance(line, str):
        return None
    return Layout.parse(line), Layout.parse(description.get("layout_asked", line))


def newest_description(directory: Path) -> dict[str, Any]:
    """Return what the newest checkpoint says of its run; {} if it cannot be read.

    Nothing is locked or written. Whether it is damaged is not asked: what resumes says
    that.
    """
    try:
        found = read_run(directory / str(saved_steps(directory)[-1]))
        check_description(found, f"the newest checkpoint in {str(directory)!r}")
        return found
    except (OSError, ValueError, IndexError):
        return {}
