"""FSDP's prefetch: the same numbers and bytes, hidden behind matmuls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import absent_mesh, audit, batch_shapes, make_mesh, make_train_step
from meshpar.models.presets import build
from meshpar.parallel import zero
from meshpar.parallel.prefetch import prefetch_notes
from meshpar.parallel.zero import Stored, gradient_in_loop, reduce_scatter
from meshpar.testing.assertions import assert_overlapped
from tests.pipelined import assert_equal_to_plain, mlp_of, model_of, step_of
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (3, "fsdp=4,remat=full"),
        (1, "fsdp=2"),
        (3, "data=2,fsdp=2,tensor=2,sequence_parallel=true,remat=save:hidden"),
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


def test_the_bytes_on_the_wire_are_those_without():
    ahead, plain = (totals(f"fsdp=4,fsdp_prefetch={key}") for key in ("on", "off"))
    for kind in ("all-gather", "reduce-scatter"):
        wire = [of["fsdp", kind]["wire_bytes"] for of in (ahead, plain)]
        assert wire[0] == wire[1] > 0


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


@pytest.mark.parametrize(
    "line", ["data=2", "fsdp=2,zero=1", "fsdp=2,microbatches=2", "fsdp=2,stage=2"]
)
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
            state_spec=spec,
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
        lambda *of: reduce_scatter(layouts, [x[0] for x in of], gradient_in_loop),
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


@pytest.mark.parametrize(("key", "count"), [("on", 2), ("off", 0)])
def test_gpus_join_a_blocks_gathers_where_they_prefetch(key, count):
    step = make_train_step(
        mlp_of(2),
        optax.sgd(0.1),
        f"fsdp=2,fsdp_prefetch={key}",
        mesh=absent_mesh("fsdp=2"),
    )
    options = step.audit_subject(batch_shapes(8, 16), platform="gpu").compiler_options
    assert sum("combine" in name for name in options) == count
