"""Real processes over gloo generate what one does, and lay weights out otherwise."""

import json

import jax
import numpy as np
import pytest

import meshpar
from meshpar.models.convert.writing import write_weights
from meshpar.models.presets import build, build_config, configure
from tests.multiprocess.children import ends_of, free_port, joined, start
from tests.refusals import names

pytestmark = pytest.mark.slow

SIZES = dict(layers=2, heads=8, kv_heads=8)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10] * 2]
OPTIONS = dict(max_tokens=3, chunk=16, page_size=4, temperature=0.7)
LAYOUTS = ["tensor=8", "fsdp=2,tensor=4", "stage=2,tensor=4,microbatches=2"]

BEGIN = f"""
import json, sys
import jax, numpy as np, optax
import meshpar
from meshpar.models.presets import build
port, number = sys.argv[1:]
model = build("test", **{SIZES})
PROMPTS, OPTIONS, LAYOUTS = {PROMPTS}, {OPTIONS}, {LAYOUTS}
joined = meshpar.distributed.start(
    coordinator=f"localhost:{{port}}", num_processes=2, process_id=int(number),
    emulate=4, timeout_s=200)

def refused(function):
    try:
        function()
    except meshpar.InputError as error:
        print("refused", error.key, error, flush=True)
"""

GENERATE = """
with joined:
    for layout in LAYOUTS:
        step = meshpar.make_train_step(model, optax.sgd(0.1), layout)
        given = {"from_layout": step.layout} if "stage" in layout else {}
        params = step.init(params=model.init(0)) if given else model.init(0)
        found = meshpar.generate(
            model, params, PROMPTS, layout=layout, **given, **OPTIONS)
        told = [[one.tokens, one.logprobs] for one in found]
        print("found", json.dumps(told), flush=True)
"""


def ends_of_both(program, timeout_s=560):
    """What two processes of four devices say, each of which must end well."""
    port = str(free_port())
    children = [
        start(["-W", "ignore", "-c", BEGIN + program, port, one]) for one in "01"
    ]
    ends = ends_of(children, timeout_s)
    for end in ends:
        assert end.status == 0, end.error[-3000:]
    return ends


def said(end, word):
    """What follows a word at the beginning of lines."""
    lines = end.output.splitlines()
    return [line[len(word) + 1 :] for line in lines if line.startswith(word)]


def test_two_processes_generate_the_tokens_of_one():
    model = build("test", **SIZES)
    wanted = meshpar.generate(
        model, model.init(0), PROMPTS, devices=jax.devices()[:1], **OPTIONS
    )
    for end in ends_of_both(GENERATE):
        lines = said(end, "found")
        assert len(lines) == len(LAYOUTS)
        for line in lines:
            tokens, logprobs = zip(*json.loads(line), strict=True)
            assert list(tokens) == [one.tokens for one in wanted]
            known = [one.logprobs for one in wanted]
            np.testing.assert_allclose(logprobs, known, atol=1e-5)


RESHARD = """
from meshpar.model.parameter import is_parameter
from meshpar.parallel.resharding import ParameterPlacement, moved, reshard_memory
rng = np.random.default_rng(0)
values = jax.tree.map(
    lambda x: rng.standard_normal(x.stacked_shape).astype(np.float32),
    model.parameters, is_leaf=is_parameter)
with joined:
    given = ParameterPlacement(model=model)
    for one, other in [("data=4,tensor=2", "tensor=8"), ("fsdp=8", "data=8")]:
        source, target = (
            ParameterPlacement.from_layout(model, layout) for layout in (one, other))
        params = moved(values, given, source)
        memory = reshard_memory(params, source, target)
        found = meshpar.reshard(params, one, other, model=model)
        assert all(array.is_deleted() for array in jax.tree.leaves(params))
        lying = jax.tree.map(lambda array: array.sharding, found)
        assert lying == target.shardings
        same = [
            np.array_equal(shard.data, value[shard.index])
            for array, value in zip(*map(jax.tree.leaves, (found, values)), strict=True)
            for shard in array.addressable_shards
        ]
        kept = {name: getattr(memory, name) for name in ("peak", "limit", "by_host")}
        print("moved", json.dumps([all(same), len(same), kept]), flush=True)
    step = meshpar.make_train_step(model, optax.sgd(1.0), "data=8")
    params = step.init(0).params
    others = jax.devices()[:4]
    refused(lambda: meshpar.reshard(
        params, "data=8", "tensor=4", model=model, devices=others))
    refused(lambda: meshpar.generate(
        model, params, PROMPTS, layout="data=8", weights="int8"))
"""


def test_weights_go_to_another_layout_of_the_same_devices_bit_by_bit():
    for end in ends_of_both(RESHARD):
        lines = list(map(json.loads, said(end, "moved")))
        assert [same for same, *_ in lines] == [True, True]
        for _, num, memory in lines:
            assert num == 4 * len(build("test", **SIZES).flat_parameters())
            assert memory["by_host"] == 0
        # Arrays that grow first by the most: none waits in the host's memory.
        assert lines[0][2]["peak"] <= lines[0][2]["limit"]
        others, whole = said(end, "refused")
        assert names(others, "processes.different_devices"), others
        assert names(whole, "generation.parameters_not_whole"), whole
        assert names(whole, "8 devices")


REFUSED = """
from meshpar.generation.engine import Engine
from meshpar.generation.generate import placed
from meshpar.generation.programs import Programs
from meshpar.generation.requests import Request
with joined:
    programs = Programs.from_model(model, "tensor=8", slots=2, max_seq=16)
    engine = Engine(programs, *placed(programs, model, model.init(0)))
    engine.submit(Request(tokens=[1, 2], max_tokens=2))
    print("tokens", json.dumps([one.token for one in engine.run()]), flush=True)
    engine.submit(Request(tokens=[1, 2 + int(number)], max_tokens=2))
    refused(lambda: list(engine.run()))
    # One process alone finds the text to stop at, and has nothing left.
    engine = Engine(
        programs, *placed(programs, model, model.init(0)),
        decode=lambda tokens: ".x"[int(number)] * len(tokens))
    engine.submit(Request(tokens=[1, 2], max_tokens=4, stop=("x",)))
    refused(lambda: list(engine.run()))
    refused(lambda: placed(programs, model, model.init(int(number))))
    devices = jax.devices()[:4]
    refused(lambda: Programs.from_model(
        model, "tensor=4", slots=2, max_seq=16, devices=devices))
"""


def test_processes_with_other_requests_are_told_so():
    first, second = ends_of_both(REFUSED)
    assert said(first, "tokens") == said(second, "tokens")
    for end in (first, second):
        for line in said(end, "refused")[:2]:
            assert names(line, "generation.differing_requests"), line
            assert names(line, "process 1")
        values = said(end, "refused")[2]
        assert names(values, "generation.differing_parameters"), values
        assert names(values, "process 1") and names(values, "process 0")
    assert len(said(first, "refused")) == 3, "the devices are its own"
    devices = said(second, "refused")[3]
    assert names(devices, "mesh.process_without_devices"), devices
    assert names(devices, "process 1") and names(devices, 2) and names(devices, 4)


def test_the_command_reads_and_prints_in_the_first_process(tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    from tests.bpe import write_bpe

    (tmp_path / "like").mkdir()
    write_bpe(tmp_path / "like" / "tokenizer.json", ["to be or not to be"])
    folder, config = tmp_path / "theirs", configure("test", vocab=300)
    values = build_config(config).init(0)
    write_weights(folder, config, values, like=tmp_path / "like")
    words = ["-m", "meshpar", "generate", "--from", str(folder), "--layout", "tensor=2"]
    words += ["--max-tokens", "3", "--json", "--start-timeout", "200"]
    file = tmp_path / "prompts.txt"
    file.write_text("to be\nor\n")
    alone = [start([*words, "--prompts", str(file)])]
    (wanted,) = ends_of(alone, timeout_s=200)
    assert wanted.status == 0, wanted.error
    children = [
        start([*words, "--prompts", str(file), *hand])
        for hand in joined(2, free_port())
    ]
    first, second = ends_of(children, timeout_s=300)
    assert (first.status, second.status) == (0, 0), first.error + second.error
    found, known = json.loads(first.output), json.loads(wanted.output)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in known]
    assert "tokens" not in second.output
    others = [
        start([*words, "--prompts", str(file), "--seed", str(seed), *hand])
        for seed, hand in enumerate(joined(2, free_port()))
    ]
    ends = ends_of(others, timeout_s=300)
    different = "process 1", "seed=1", "process 0", "seed=0"
    assert any(all(names(end.error, one) for one in different) for end in ends), ends
    assert all(end.status == 2 for end in ends)
