"""Layout equivalence: every layout's numbers against those of one device."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar import Layout, Model, Rules, TrainState, TrainStep, make_train_step
from meshpar.checks.batches import check_batch
from meshpar.errors import InputError, whole_number
from meshpar.hardware.platforms import platform_named
from meshpar.model.contract import check_model
from meshpar.model.inputs import open_size
from meshpar.model.parameter import is_mapped
from meshpar.testing.batches import (
    Arrays,
    check_undeclared,
    random_batch,
    step_batches,
    with_batch,
)
from meshpar.testing.comparison import (
    Deviation,
    Report,
    Result,
    bf16_chains,
    copies,
    deviations,
    shrink,
)
from meshpar.testing.layout_cases import Case, Choices, draw_cases, refusal
from meshpar.testing.reference import (
    NUM_STEPS,
    Values,
    gradients_in,
    momentum_sgd,
    single_device,
)
from meshpar.train.state import split_constants

DEFAULT_SEQ = 16
DEFAULT_BATCH = 8


def check_layouts(
    model: Model,
    batch: Mapping[str, Any] | None = None,
    layouts: Sequence[Layout | str] | None = None,
    *,
    num: int = 8,
    seed: int = 0,
    rules: Rules | None = None,
    num_devices: int | None = None,
) -> Report:
    """Asserts that layouts train the same model as one device does.

    Compares, per array, initial parameters (bitwise), loss, gradients, global gradient
    norm, and the parameters after three optimizer steps, with a single-device program
    that shares no code with the training step but the keys; and whether the
    devices' copies of an array are equal. Bounds: `meshpar.testing.comparison`.

    Args:
        model: Any model; a small one, for every layout is compiled (seconds each).
        batch: The arrays that the model reads, each with the example first; random
            ones of the declared inputs, of several sizes, when absent.
        layouts: What to check, or cases as a report prints them; `num` random valid
            layouts when absent.
        num: How many to draw, of all mesh axes and options that are built.
        seed: Of the drawn layouts, masks, batches and initial values.
        rules: Logical axis -> mesh axes; what each layout asks for when absent.
        num_devices: Devices to use; all of JAX's by default.

    Returns:
        The report, which has every case with its largest errors.

    Raises:
        AssertionError: A layout differs; the message has the table of all cases, and
            the smallest case that still fails.
        InputError: A layout that the library refuses, or none can be drawn.

    Example:
        >>> from meshpar.models.presets import build
        >>> model = build("test", layers=1)
        >>> report = check_layouts(model, layouts=["data=2"])
        >>> report.ok
        True
    """
    check_model(model)
    whole_number("seed", seed, least=0)
    if batch is not None and not isinstance(batch, Mapping):
        raise InputError(
            f"batch is a {type(batch).__name__}; give name -> array",
            key="batch.not_a_dict",
        )
    devices = _first_devices(num_devices)
    arrays = None if batch is None else {k: np.asarray(v) for k, v in batch.items()}
    choices = _only_model(model, arrays or {}, rules)
    if batch is None:
        random_batch(model, 1, 1, seed=0)
    if layouts is None:
        cases = draw_cases(num, seed, choices, devices)
    else:
        cases = [make_case(layout, choices, devices, seed=seed) for layout in layouts]
    report = run_cases(cases, choices, devices, batch=arrays)
    if not report.ok:
        raise AssertionError(str(report))
    return report


def _only_model(
    given: Model, arrays: Mapping[str, np.ndarray], rules: Rules | None
) -> Choices:
    """Return choices of one model, whose sizes are those of a batch if there is one."""
    model = with_batch(given, arrays) if arrays else given
    return Choices(
        models=("",),
        build=lambda _: model,
        check=partial(check_undeclared, given, arrays),
        global_batch=check_batch(model.inputs or {}, arrays) if arrays else None,
        seq=open_size(model.known_inputs, arrays) if arrays else None,
        rules=rules,
    )


def make_case(
    layout: Layout | str,
    choices: Choices,
    devices: Sequence[jax.Device],
    *,
    mask: str = "full",
    seed: int = 0,
    resume_as: Layout | str | None = None,
) -> Case:
    """Make the case of one layout, on the first of the models, or of a case's line.

    Raises:
        InputError: The layout cannot be read, needs more devices, or does not suit the
            model or the batch.
    """
    if isinstance(layout, str) and layout.startswith("--"):
        case = Case.parse(layout)
        _fitting(case.layout, len(devices))
    else:
        layout = _fitting(Layout.of(layout), len(devices))
        shards = layout.batch_shards * layout.microbatches
        case = Case(
            layout=layout,
            model=choices.models[0],
            global_batch=choices.global_batch or -(-DEFAULT_BATCH // shards) * shards,
            seq=choices.seq or DEFAULT_SEQ,
            mask=mask,
            seed=seed,
            resume_as=None
            if resume_as is None
            else _fitting(Layout.of(resume_as), len(devices)),
        )
    if choices.refused(case) is not None:
        return case
    refused = refusal(case, choices)
    if refused is not None:
        message = f"layout {str(case.layout)!r}: {refused}"
        raise InputError(message, key=refused.key)
    # Raises what only building the step finds.
    _make_step(case, choices, devices, learning_rate=0.0)
    return case


def run_cases(
    cases: Sequence[Case],
    choices: Choices,
    devices: Sequence[jax.Device],
    *,
    batch: Arrays | None = None,
    on_case: Callable[[Case], None] = lambda _: None,
    on_result: Callable[[Result], None] = lambda _: None,
) -> Report:
    """Run every case, and shrink the first that fails.

    Args:
        cases: What to run.
        choices: What they were drawn from.
        devices: Devices to use.
        batch: The caller's batch; random tokens when absent.
        on_case: Called with every case before it runs: XLA's aborts are no exceptions.
        on_result: Called with every result as it comes.
    """

    def run(case: Case) -> Result:
        start = time.perf_counter()
        found: tuple[Deviation, ...] = ()
        failure, refused = "", choices.refused(case)
        try:
            if refused:
                failure = _not_refused(case, choices, devices, refused)
            else:
                found = _compare(case, choices, devices, batch)
        except Exception as error:  # whatever stops a valid case is a failure of it
            failure = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        return Result(
            case=case,
            deviations=found,
            failure=failure,
            refused=refused or "",
            seconds=seconds,
        )

    results = []
    for case in cases:
        on_case(case)
        results.append(run(case))
        on_result(results[-1])
    failed = next((result for result in results if not result.ok), None)
    smallest = None if failed is None else shrink(failed, run, choices)
    return Report(results=tuple(results), smallest=smallest)


def _compare(
    case: Case, choices: Choices, devices: Sequence[jax.Device], batch: Arrays | None
) -> tuple[Deviation, ...]:
    model = choices.build(case.model)
    if batch is None:
        batch = random_batch(model, case.global_batch, case.seq, case.seed)
    batches = step_batches(model, batch, case.mask, case.seed, NUM_STEPS)
    options = _options(model, devices)
    reference = single_device(model, batches, case.seed, options)
    step = later = _make_step(case, choices, devices, reference.learning_rate)
    if case.resume_as is not None:
        other = replace(case, layout=case.resume_as)
        later = _make_step(other, choices, devices, reference.learning_rate)
    found, unequal = _laid_out(step, later, batches, case.seed)
    chains = None
    if case.layout.precision == "bf16":
        chains = bf16_chains(model, batch, sum_parts=case.layout.tensor)
    return (*deviations(found, reference.values, chains), *unequal)


def _not_refused(
    case: Case, choices: Choices, devices: Sequence[jax.Device], key: str
) -> str:
    """Return how a case differs from its expected refusal; empty if it does not."""
    model, twist = choices.build(case.model), choices.twist(case.model)
    batch = random_batch(model, case.global_batch, case.seq, case.seed)
    if twist is not None:
        batch = twist.batch(batch)
    try:
        step = _make_step(case, choices, devices, learning_rate=0.0)
        step.lower(step.place(batch))
    except InputError as error:
        return "" if error.key == key else f"refused as {error.key}: {error}"
    return f"trains, but must be refused as {key}"


def _make_step(
    case: Case,
    choices: Choices,
    devices: Sequence[jax.Device],
    learning_rate: float,
) -> TrainStep:
    model = choices.build(case.model)
    return make_train_step(
        model,
        momentum_sgd(learning_rate),
        case.layout,
        rules=choices.case_rules(case),
        devices=devices[: case.layout.num_devices],
        compiler_options=_options(model, devices),
    )


def _options(model: Model, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return options that compile quickly, if they leave initial values equal.

    Without optimisation, sums and products of one build are contracted in one program
    and not in another, unless all its values are drawn and mapped one by one.
    """
    keys = jax.random.key(0)
    if not all(is_mapped(build, keys) for build in model.build.values()):
        return {}
    return quick_compile_options(devices[0].platform)


def _laid_out(
    step: TrainStep, later: TrainStep, batches: Sequence[Arrays], seed: int
) -> tuple[Values, list[Deviation]]:
    """Train three steps, from the second on under `later`; return the values."""
    state = step.init(seed)
    initial = _trained(step, state)[0]
    state, metrics = step(state, batches[0])
    gradients = step.in_layer_order(gradients_in(state.opt_state))
    if later is not step:
        state = resumed(step, later, state)
    for batch in batches[1:]:
        state, _ = later(state, batch)
    parameters, model_state = _trained(later, state)
    found = Values(
        initial=initial,
        state=model_state,
        loss=jax.device_get(metrics["loss"]),
        grad_norm=jax.device_get(metrics["grad_norm"]),
        gradients=gradients,
        parameters=parameters,
    )
    return found, copies(state.params)


def _trained(step: TrainStep, state: TrainState) -> tuple[Any, Any]:
    """Return parameters and model state, layers first to last."""
    apart = split_constants(step.model, state)
    return step.in_layer_order(apart.params), step.in_layer_order(apart.model_state)


def _fitting(layout: Layout, num_devices: int) -> Layout:
    if layout.is_open:
        return layout.resolve(num_devices)
    if layout.num_devices > num_devices:
        raise InputError(
            f"layout {str(layout)!r} needs {layout.num_devices} devices, but there are "
            f"{num_devices}; use fewer, or emulate more",
            key="layout.wrong_device_count",
        )
    return layout


def _first_devices(num_devices: int | None) -> list[jax.Device]:
    devices = jax.devices()
    if num_devices is not None and num_devices > len(devices):
        raise InputError(
            f"num_devices={num_devices}, but there are {len(devices)}; emulate more "
            "or use fewer",
            key="mesh.too_few_devices",
        )
    return devices[:num_devices]


def resumed(step: TrainStep, later: TrainStep, state: TrainState) -> TrainState:
    """Return a state of one step as another step reads it from a checkpoint."""
    # Orbax takes long to import, and most who compare layouts need none of it.
    from meshpar.train.checkpoint import Checkpoints

    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(Path(folder), layer_orders=step.layer_orders) as checkpoints:
            checkpoints.save(state, {})
        with Checkpoints(Path(folder), layer_orders=later.layer_orders) as checkpoints:
            return checkpoints.restore(later.state_shapes, later.shardings)


_CANDIDATES = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}


def quick_compile_options(platform: str) -> dict[str, int | bool]:
    """Return options for programs that run a few times: no LLVM optimisation on CPUs.

    What partitions a program and places its collectives runs before LLVM and is the
    same. Measured with jax 0.10.2 on two busy cores, a two-layer Llama on
    data=2,fsdp=2,tensor=2: initial values 12 s -> 0.6 s, training step 7 s -> 1.2 s.
    """
    if not platform_named(platform).is_host:
        return {}
    # XLA drops options between versions, and refuses those it does not know.
    return {name: value for name, value in _CANDIDATES.items() if _is_known(name)}


@functools.cache
def _is_known(name: str) -> bool:
    options = {name: _CANDIDATES[name]}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(np.float32(0)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
