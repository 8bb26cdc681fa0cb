"""FSDP's prefetch: the same numbers and bytes, hidden behind matmuls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import Layout, absent_mesh, audit, batch_shapes, make_mesh, make_train_step
from meshpar.models.presets import build
from meshpar.parallel import zero
from meshpar.parallel.prefetch import prefetch_notes
from meshpar.parallel.zero import Stored, reduce_in_loop
from meshpar.testing.assertions import assert_overlapped
from tests.pipelined import assert_equal_to_plain, mlp_of, model_of, step_of
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (3, "fsdp=4,remat=full"),
        (1, "fsdp=2"),
        (3, "data=2,fsdp=2,tensor=2,sequence_parallel=true,remat=save:hidden"),
        (3, "data=2,fsdp=2,tensor=2,zero=1,remat=full"),
        (3, "data=2,tensor=2,zero=0"),
        (1, "data=4,zero=2"),
    ],
)
def test_small_blocks_have_the_loss_and_gradients_of_the_model_alone(layers, line):
    assert_equal_to_plain(mlp_of(layers), f"{line},fsdp_prefetch=on")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "dropout", "line"),
    [
        (3, 0.0, "fsdp=4,remat=full"),
        (1, 0.0, "fsdp=2"),
        (2, 0.1, "data=2,fsdp=2,tensor=2,sequence_parallel=true,remat=selective"),
        (3, 0.0, "fsdp=8"),
        (3, 0.1, "data=2,fsdp=2,remat=dots"),
        (3, 0.0, "fsdp=4,remat=save:attention_qkv/mlp_hidden"),
        (3, 0.0, "fsdp=2,tensor=2,remat=none"),
        (2, 0.0, "data=2,fsdp=2,zero=2"),
        (2, 0.0, "data=4,zero=2,remat=full"),
        (2, 0.0, "data=2,fsdp=2,zero_axes=data/fsdp"),
    ],
)
def test_loss_and_gradients_equal_those_of_the_model_alone(layers, dropout, line):
    assert_equal_to_plain(model_of(layers, dropout), f"{line},fsdp_prefetch=on")


@pytest.mark.slow
def test_a_head_of_its_own_has_its_gradients():
    model = build("test", layers=2, tied=False)
    assert_equal_to_plain(model, "fsdp=4,fsdp_prefetch=on,remat=full")


def test_a_small_models_head_of_its_own_has_its_gradients():
    model = mlp_of(2)
    ends = {"out": model.parameters["table"], **model.parameters}

    def head(params, *rest):
        return model.head({"table": params["out"]}, *rest)

    untied = dataclasses.replace(model, parameters=ends, head=head)
    assert_equal_to_plain(untied, "fsdp=4,fsdp_prefetch=on,remat=full")


@functools.cache
def totals(line):
    report = audit(step_of(mlp_of(4), line), batch_shapes(8, 16))
    assert not report.surprises
    return report.totals()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_bytes_on_the_wire_are_those_without(zero, monkeypatch):
    monkeypatch.setattr("meshpar.parallel.zero._HALVED_VALUES", 0)
    ahead, plain = (
        totals(f"fsdp=4,zero={zero},fsdp_prefetch={key}") for key in ("on", "off")
    )
    kinds = ("all-gather", "reduce-scatter")
    wire = [ahead["fsdp", kind]["wire_bytes"] for kind in kinds]
    if zero:
        assert wire == [plain["fsdp", kind]["wire_bytes"] for kind in kinds]
    else:  # All that is left to all-reduce are the loss's few numbers.
        few = ahead["fsdp", "all-reduce"]["wire_bytes"]
        assert sum(wire) + few == plain["fsdp", "all-reduce"]["wire_bytes"]
        assert few < 0.01 * sum(wire)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fsdp=2", ["fsdp_prefetch: not on cpu"]),
        ("fsdp=2,microbatches=2,fsdp_gather=microbatch", ["fsdp_prefetch: not where"]),
        ("fsdp=2,fsdp_prefetch=on", []),
        ("fsdp=2,fsdp_prefetch=off", []),
        ("data=2", []),
    ],
)
def test_a_loop_that_does_not_prefetch_is_noted(line, words):
    notes = prefetch_notes(step_of(mlp_of(2), line).placement)
    assert [note[: len(one)] for note, one in zip(notes, words, strict=True)] == words


@pytest.mark.parametrize("line", ["tensor=2", "microbatches=2", "stage=2"])
def test_a_key_without_effect_is_refused(line, refuses):
    with refuses("layout.fsdp_prefetch_without_effect", "fsdp_prefetch=on"):
        step_of(mlp_of(2), f"{line},fsdp_prefetch=on")


@pytest.mark.parametrize("most, scatters", [(2**29, 2), (100, 3)])
def test_gradients_joined_to_one_padded_matrix_keep_their_values(
    most, scatters, monkeypatch
):
    """The first, of 120 values, is alone where 100 are the most."""
    monkeypatch.setattr(zero, "_JOINED_VALUES", most)

    def stored(*axes):
        spec = P(*axes)
        return Stored(
            spec=spec,
            used_spec=P(*(None for _ in axes)),
            loop_spec=spec,
            gradient_spec=spec,
            compute_dtype=jnp.float32,
            scatter_columns=8,
        )

    layouts = [stored(None, None, "fsdp"), stored("fsdp", None), stored("fsdp")]
    layouts += [stored("fsdp", None), stored(None)]
    shapes = [(3, 5, 8), (8, 2), (8,), (12, 3), (7,)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    found = [
        jax.random.normal(key, (4, *shape))
        for key, shape in zip(keys, shapes, strict=True)
    ]
    scatter = jax.shard_map(
        lambda *of: reduce_in_loop(layouts, [x[0] for x in of]),
        mesh=make_mesh("fsdp=4", jax.devices()[:4]),
        in_specs=P("fsdp"),
        out_specs=[layout.gradient_spec for layout in layouts[:-1]] + [P("fsdp")],
        check_vma=False,
    )
    text = str(jax.make_jaxpr(scatter)(*found))
    assert text.count(" reduce_scatter[") == scatters
    *scattered, own = jax.jit(scatter)(*found)
    for x, wanted in zip(scattered, found, strict=False):
        np.testing.assert_allclose(x, wanted.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(own, found[-1].reshape(-1))


def test_gradients_summed_in_a_loop_are_summed_whatever_their_dims(monkeypatch):
    """In halves along a dim that divides, or by an all-reduce: 3 x 8, 3 x 5 and 7."""
    monkeypatch.setattr(zero, "_HALVED_VALUES", 0)
    whole = Stored(
        spec=P(None, None),
        used_spec=P(None, None),
        loop_spec=P(None, None),
        gradient_spec=P(None, None),
        compute_dtype=jnp.float32,
        loop_sums=("fsdp",),
    )
    layouts = [whole, whole, dataclasses.replace(whole, spec=P(None))]
    shapes = [(3, 8), (3, 5), (7,)]
    found = [
        jnp.arange(4.0 * size).reshape(4, *shape)
        for shape, size in zip(shapes, (24, 15, 7), strict=True)
    ]
    summed = jax.shard_map(
        lambda *of: reduce_in_loop(layouts, [x[0] for x in of]),
        mesh=make_mesh("fsdp=4", jax.devices()[:4]),
        in_specs=P("fsdp"),
        out_specs=P(),
        check_vma=False,
    )
    text = str(jax.make_jaxpr(summed)(*found))
    kinds = ("reduce_scatter[", "all_gather[", " psum")
    assert [text.count(kind) for kind in kinds] == [1, 1, 2]
    for x, wanted in zip(jax.jit(summed)(*found), found, strict=True):
        np.testing.assert_array_equal(x, wanted.sum(0))


# Llama 3 8B on 64 devices, four sequences of 2048 tokens each.

_LINE = "fsdp=64,remat=full,precision=bf16"


def llama_step(line):
    model = build("llama3-8b")
    mesh = absent_mesh("fsdp=64")
    return make_train_step(model, optax.adamw(1e-3), line, mesh=mesh, max_grad_norm=1.0)


def held(target, share):
    """The report of a step whose matmuls hide that share of the bytes over `fsdp`."""
    report = assert_overlapped(
        llama_step(_LINE),
        batch_shapes(256, 2048),
        {"fsdp": share},
        target=target,
        timeout_s=3000,
    )
    assert not report.surprises
    return report


@pytest.mark.slow
@needs_gpu_compiler
def test_gpus_hide_nine_tenths_of_the_bytes_and_hold_little_more():
    ahead = held("gpu:h100:8x8", 0.9).compiled_memory.temp_bytes
    step = llama_step(f"{_LINE},fsdp_prefetch=off")
    plain = audit(step, batch_shapes(256, 2048), target="gpu:h100:8x8")
    assert ahead <= 1.15 * plain.compiled_memory.temp_bytes


@pytest.mark.slow
@needs_tpu_compiler
def test_tpus_hide_nine_tenths_of_the_bytes_and_gather_and_scatter_them():
    report = held("tpu:v5p:4x4x4", 0.9)
    sent = {kind: total["wire_bytes"] for (_, kind), total in report.totals().items()}
    assert sent["all-reduce"] < 0.001 * min(sent["all-gather"], sent["reduce-scatter"])


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    "line", ["data=8,tensor=8,sequence_parallel=true,zero=1", "data=64,zero=1"]
)
def test_gpus_hide_what_zero_1_sends_over_data(line):
    layout = Layout.parse(f"{line},remat=full,precision=bf16")
    step = make_train_step(
        build("llama3-8b"),
        optax.adamw(1e-3),
        layout,
        mesh=absent_mesh(layout),
        max_grad_norm=1.0,
    )
    batch, target = batch_shapes(64, 4096), "gpu:h100:8x8"
    report = assert_overlapped(
        step, batch, {"data": 0.85}, target=target, timeout_s=3000
    )
    assert not report.surprises


@pytest.mark.parametrize(("key", "count"), [("on", 3), ("off", 0)])
def test_gpus_join_a_blocks_gathers_where_they_prefetch(key, count):
    step = make_train_step(
        mlp_of(2),
        optax.sgd(0.1),
        f"fsdp=2,fsdp_prefetch={key}",
        mesh=absent_mesh("fsdp=2"),
    )
    options = step.audit_subject(batch_shapes(8, 16), platform="gpu").compiler_options
    assert sum("combine" in name or "limit" in name for name in options) == count
