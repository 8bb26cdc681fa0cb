"""Wrong calls and command lines: each is told in one line, with a way out."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar import Blocks, Input, Layout, from_nnx, make_train_step
from meshpar.models.presets import build
from meshpar.testing.equivalence import check_layouts
from tests.refusals import names

# Command lines. Files that a row names are made by `folder`.

PLAN = "plan --model llama3-8b --devices 8 --global-batch 8"
ESTIMATE = "estimate --model llama3-8b --layout"
SCHEDULE = "schedule --schedule 1f1b --stages 4 --microbatches 8"
LINT = "lint --preset tiny --layout data=2"
AUDIT = "audit --preset tiny --layout data=2"
NOT_WHOLE, NOT_POSITIVE = "value.not_whole_number", "value.not_positive"
IMPLAUSIBLE = "hardware.implausible_number"
RESIDUAL = "layout.unknown_residual"

# Name of a file -> what it changes of an H100, and what is told of it.
DEVICE_FILES = {
    name: (f'like = "h100-80gb"\n{words}', refusal)
    for name, words, *refusal in (
        ("slow", "link_bytes_per_s = 1e-300", IMPLAUSIBLE, "link_bytes_per_s=1e-300"),
        (
            *("fast", "network_bytes_per_s = 1e30"),
            *(IMPLAUSIBLE, "network_bytes_per_s=1e+30", 1000),
        ),
        (
            *("nan", "host_bytes_per_s = nan"),
            *("hardware.not_positive", "host_bytes_per_s=nan"),
        ),
        ("large", "memory_bytes = 1e300", IMPLAUSIBLE, "memory_bytes=1e+300", 1000),
        ("dims", "torus_dims = 9", IMPLAUSIBLE, "torus_dims=9", 0, 6),
        ("joined", "domain_devices = 99999999", IMPLAUSIBLE, "domain_devices=1e+08", 1),
        ("late", "[efficiency]\nlaunch_s = 1e6", IMPLAUSIBLE, "launch_s=1e+06", 0),
        ("far", "[efficiency]\nnetwork_hop_s = 60", IMPLAUSIBLE, "network_hop_s=60"),
        (
            *("cores", "[efficiency]\ncollective_cores = 15"),
            *(IMPLAUSIBLE, "collective_cores=15"),
        ),
        (
            *("lost", "[efficiency]\nmatmul = nan"),
            *("hardware.not_a_fraction", "matmul=nan", 0, 1),
        ),
        ("peak", "[peak_flops]\nbf16 = 1e40", IMPLAUSIBLE, "peak_flops bf16=1e+40"),
    )
}

COMMANDS = [
    # Misspelt words, with the nearest.
    ("lnt", "command.unknown_command", "'lnt'", "'lint'"),
    ("--vresion", "command.unknown_option", "--vresion", "--version"),
    ("plan --devicse 8", "command.unknown_option", "--devicse 8", "--devices"),
    (f"{PLAN} --hardware h1000", "hardware.unknown_device", "'h1000'", "'h100'"),
    (f"{PLAN} --keep tensr=8", "layout.unknown_key", "'tensr'", "'tensor'"),
    (f"{PLAN} --forbid tensr", "mesh.unknown_axis", "'tensr'", "'tensor'"),
    (
        f"{PLAN} --execution megatro",
        *("plan.unknown_execution", "'megatro'", "'megatron-core'"),
    ),
    (
        "plan --model llama-8b --global-batch 8",
        *("model.unknown_name", "'llama-8b'", "'llama3-8b'"),
    ),
    (f"{ESTIMATE} fsdp=8,remat=ful", "layout.unknown_value", "remat=ful", "selective"),
    (
        f"{ESTIMATE} stage=2,schedule=1fb1",
        *("schedule.unknown_name", "'1fb1'", "'1f1b'"),
    ),
    (
        "schedule --schedule 1f1bb --stages 4 --microbatches 8",
        *("schedule.unknown_name", "'1f1bb'", "'1f1b'"),
    ),
    ("lint --preset tny --layout data=2", "model.unknown_preset", "'tny'", "'tiny'"),
    (f"{LINT} --rules fsd", "rules.unknown_preset", "'fsd'", "'fsdp'"),
    (
        f"{AUDIT} --target gpu:h10:1x2",
        *("audit.unknown_target", "gpu:h10", "'gpu:h100'"),
    ),
    ("fuzz --preset tiny --layout dat=2", "layout.unknown_key", "'dat'", "'data'"),
    # Numbers out of range, and what is no number.
    (f"{PLAN} --plans 0", NOT_WHOLE, "--plans", "'0'", 1),
    (f"{PLAN} --max-memory-gib nan", NOT_POSITIVE, "--max-memory-gib", "'nan'", 0),
    (f"{PLAN} --keep data=-1", "plan.open_size_kept", "data=-1"),
    (f"{PLAN} --keep data_splits=6/2", "plan.data_splits_kept", "data_splits"),
    (
        f"{ESTIMATE} tensor=8 --slots 4 --mesh-order tensor",
        "command.mesh_order_of_others",
    ),
    (
        f"{ESTIMATE} data=2,fsdp=4,microbatches=2,data_splits=3/1 --execution maxtext",
        *("plan.data_splits_of_ours", "data_splits=3/1", "'maxtext'"),
    ),
    (f"{PLAN} --keep tensor=3", "plan.no_such_layout", 8, "tensor=3"),
    (f"{PLAN} --hosts 3", "hardware.indivisible_hosts", 8, 3),
    (f"{ESTIMATE} fsdp=0", "layout.not_whole_number", "fsdp=0", 1),
    (f"{ESTIMATE} fsdp=-1", "layout.open_size", "'fsdp'", -1, "--devices"),
    (
        f"{ESTIMATE} fsdp=8 --devices 4",
        *("layout.wrong_device_count", "'fsdp=8'", 8, 4),
    ),
    (f"{ESTIMATE} fsdp=8 --global-batch 3", "batch.indivisible", 3, "data=1", 8),
    (f"{ESTIMATE} tensor=3", "layout.indivisible", "heads=32", "tensor=3"),
    (
        f"{ESTIMATE} stage=64,microbatches=64",
        *("layout.too_many_stages", 64, 32),
    ),
    (
        f"{SCHEDULE} --forward-ms 1e400",
        "value.out_of_range",
        "--forward-ms",
        "'1e400'",
        0,
    ),
    (f"{SCHEDULE} --forward-ms 1/2", "schedule.wrong_number_of_times", 2, 4),
    (f"{SCHEDULE} --chunks 2", "schedule.unsupported_chunks", "chunks=2", "'1f1b'"),
    (f"{LINT} --large-bytes -5", NOT_WHOLE, "--large-bytes", "'-5'", 1),
    (f"{AUDIT} --timeout nan", NOT_POSITIVE, "--timeout", "'nan'", 0),
    (f"{AUDIT} --memory-gib inf", NOT_POSITIVE, "--memory-gib", "'inf'", 0),
    (f"{AUDIT},tensor=3 --devices 8", "layout.wrong_device_count", 6, 8),
    (f"{AUDIT},tensor=3", "layout.indivisible", "'heads'", 8, "'tensor'", 3),
    ("fuzz --preset tiny --devices -1", NOT_WHOLE, "--devices", "'-1'", 1),
    ("fuzz --preset tiny --seed -1", "value.seed_out_of_range", "--seed -1", 0),
    (
        f"{PLAN} --seq 99999999999999999999",
        *(NOT_WHOLE, "--seq", "'99999999999999999999'"),
    ),
    (f"{PLAN} --seq 9999999999", "plan.size_too_large", 9999999999, 1000000000),
    (f"{PLAN} --seq {'9' * 5000}", NOT_WHOLE, "--seq", f"'{'9' * 40}...'"),
    (
        "plan --model gpt2 --devices 8 --global-batch 8 --seq 4096",
        *("plan.seq_too_long", 4096, "seq=1024"),
    ),
    (
        f"{ESTIMATE} fsdp=8,microbatches={10**20}",
        *("plan.size_too_large", 8 * 10**20, 1000000000),
    ),
    (f"{ESTIMATE} fsdp={10**20}", "command.too_many_devices", 10**20, 1000000),
    (
        "plan --model llama3-8b --devices 735134400 --global-batch 8",
        *("command.too_many_devices", 735134400, 1000000),
    ),
    (
        "show --model llama3-8b --layout fsdp=-1 --html page.html",
        *("layout.open_size", "'fsdp'", -1, "--devices"),
    ),
    (f"{ESTIMATE} fsdp=-1 --hosts 2", "layout.open_size", "'fsdp'", -1),
    (
        f"{SCHEDULE} --hop-ms nan",
        "value.out_of_range",
        "--hop-ms",
        "'nan'",
        0,
        1000000000,
    ),
    (
        "schedule --schedule 1f1b --stages 1000000 --microbatches 1000000",
        *("schedule.too_large", 1000000000000, 1000000),
    ),
    (f"{PLAN} --tokens nan", NOT_POSITIVE, "--tokens", "'nan'", 0),
    (f"{PLAN} --tokens 1e12 --price -2", NOT_POSITIVE, "--price", "'-2'", 0),
    (f"{PLAN} --tokens 1e12 --mtbf 0", NOT_POSITIVE, "--mtbf", "'0'", 0),
    (f"{PLAN} --price 2", "command.option_without_tokens", "--price", "--tokens"),
    (f"{PLAN} --mtbf 24", "command.option_without_tokens", "--mtbf", "--tokens"),
    (
        f"{PLAN} --tokens 1e12 --restart-s 9",
        *("command.option_without_failures", "--restart-s", "--mtbf"),
    ),
    (
        f"{PLAN} --keep fsdp=8 --tokens 1e12 --mtbf 1e-9",
        *("plan.training_never_ends", "3.6e-06", 600, "--mtbf"),
    ),
    (f"{PLAN} --measure 0", NOT_WHOLE, "--measure", "'0'", 1),
    # Residuals that no block names.
    (f"{PLAN} --keep remat=save:nosuch", RESIDUAL, "'nosuch'", "mlp_gate_up"),
    (f"{PLAN} --keep remat=offload:mlp_up", RESIDUAL, "'mlp_up'", "'mlp_gate_up'"),
    (f"{PLAN} --layout remat=save:nosuch", RESIDUAL, "'nosuch'", "mlp_gate_up"),
    (f"{ESTIMATE} fsdp=8,remat=save:nosuch", RESIDUAL, "'nosuch'", "mlp_gate_up"),
    # What must be said, and what excludes itself.
    ("", "command.missing_option", "COMMAND"),
    ("plan --model llama3-8b --devices 8", "plan.no_batch", "--global-batch"),
    ("estimate --model llama3-8b", "command.missing_option", "--layout"),
    ("lint --layout data=2", "command.no_model", "--preset", "--model"),
    (
        f"{PLAN} --forbid tensor --keep tensor=2",
        *("plan.axis_kept_and_forbidden", "tensor=2", "'tensor'"),
    ),
    ("schedule --schedule 1f1b", "schedule.no_size", "--stages", "--microbatches"),
    (f"{ESTIMATE} fsdp=8,fsdp=8", "layout.repeated_key", "'fsdp'"),
    (f"{ESTIMATE} fsdp", "layout.not_key_value", "'fsdp'"),
    (f"{ESTIMATE} data=2,chunks=2", "layout.option_without_axis", "chunks", "stage=1"),
    (f"{AUDIT} --recipe own:none", "command.recipe_and_model", "'own:none'"),
    # Files.
    (f"{PLAN} --html no/such.html", "command.no_folder", "'no/such.html'", "'no'"),
    (f"{PLAN} --html .", "command.file_is_folder", "--html", "'.'"),
    (f"{PLAN} --html /proc/no.html", "command.unwritable_file", "'/proc/no.html'"),
    (
        "show --preset tiny --layout data=2 --html no/such.html",
        *("command.no_folder", "--html", "'no'"),
    ),
    (f"{SCHEDULE} --plot no/such.svg", "command.no_folder", "--plot", "'no'"),
    (f"{SCHEDULE} --plot x.pdf", "command.unknown_suffix", "--plot", "'x.pdf'"),
    (f"{SCHEDULE} --trace no/such.json", "command.no_folder", "--trace", "'no'"),
    ("calibrate --output no/such.toml", "command.no_folder", "--output", "'no'"),
    ("schedule --schedule missing.csv", "command.unreadable_file", "'missing.csv'"),
    ("schedule --schedule wrong.csv", "schedule.unreadable_action", "rank 0", "'zz'"),
    ("schedule --schedule bytes.csv", "schedule.unreadable_file", "'bytes.csv'"),
    (f"{PLAN} --hardware missing.toml", "hardware.unreadable_toml", "'missing.toml'"),
    (f"{PLAN} --hardware wrong.toml", "hardware.unreadable_toml", "'wrong.toml'"),
    *(
        (f"{PLAN} --hardware {name}.toml", *refusal)
        for name, (_, refusal) in DEVICE_FILES.items()
    ),
    (
        "lint --model wrong.json --layout data=2",
        *("weights.unreadable_json", "'wrong.json'"),
    ),
    (
        "lint --model-from own:none --layout data=2",
        *("command.no_model_returned", "'own:none'", "NoneType", "meshpar.Model"),
    ),
    (
        "lint --model-from own:no --layout data=2",
        *("command.function_not_found", "'own:no'"),
    ),
]

QUOTING = {
    *(
        "command.unwritable_file",
        "command.unreadable_file",
        "command.function_not_found",
    ),
    *("hardware.unreadable_toml", "weights.unreadable_json"),
}
"""Errors that quote what Python's version, or the system, says."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "wrong.csv").write_text("0F0,zz\n")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "wrong.toml").write_text("x = [")
    (tmp_path / "wrong.json").write_text("{")
    for name, (text, _) in DEVICE_FILES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "own.py").write_text("def none(**sizes):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "line, refusal",
    [(line, refusal) for line, *refusal in COMMANDS],
    ids=[line[:200] for line, *_ in COMMANDS],
)
def test_a_wrong_command_line_is_one_line_on_stderr_and_status_2(
    line, refusal, folder, refuses_command
):
    refuses_command(line.split(), *refusal, words=refusal[0] not in QUOTING)


# Calls.

SGD = optax.sgd(0.1)
BATCH = {
    "tokens": np.zeros((8, 16), np.int32),
    "targets": np.zeros((8, 16), np.int32),
    "weights": np.ones((8, 16), np.float32),
}


@pytest.fixture(scope="module")
def step():
    return make_train_step(build("test"), SGD, "data=8")


def made(layout="data=8", **options):
    return make_train_step(build("test"), SGD, layout, **options)


CALLS = [
    (
        "a layout of no text",
        lambda: Layout.parse(3),
        ("layout.not_a_layout", "int"),
    ),
    (
        "a key of no layout",
        lambda: Layout.parse("dta=2"),
        ("layout.unknown_key", "'dta'", "'data'"),
    ),
    (
        "a size of text",
        lambda: Layout(data="2"),
        ("layout.not_whole_number", "data='2'", 1),
    ),
    (
        "devices of text",
        lambda: Layout(data=-1).resolve("8"),
        ("value.not_whole_number", "num_devices='8'"),
    ),
    (
        "a model by name",
        lambda: make_train_step("tiny", SGD, "data=8"),
        ("model.not_a_model", "str", "meshpar.Model"),
    ),
    (
        "no optimizer",
        lambda: make_train_step(build("test"), "adamw", "data=8"),
        ("optimizer.not_an_optimizer", "'adamw'"),
    ),
    ("a layout of nothing", lambda: made(None), ("layout.not_a_layout", "NoneType")),
    (
        "too many devices",
        lambda: made("data=16"),
        ("layout.wrong_device_count", "'data=16'", 16, 8),
    ),
    (
        "a number of devices",
        lambda: made(devices=2),
        ("mesh.not_devices", "devices=2"),
    ),
    (
        "a mesh of text",
        lambda: made(mesh="data=8"),
        ("mesh.not_a_mesh", "str", "make_mesh"),
    ),
    (
        "rules of a dict",
        lambda: made(rules={"mlp": None}),
        ("rules.not_rules", "dict", "meshpar.Rules"),
    ),
    (
        "rules by name",
        lambda: made(rules="fsdp"),
        ("rules.not_rules", "str", "meshpar.Rules"),
    ),
    (
        "a limit of text",
        lambda: made(max_grad_norm="1"),
        ("value.not_positive", "max_grad_norm='1'"),
    ),
    (
        "a limit below 0",
        lambda: made(max_grad_norm=-1),
        ("value.not_positive", "max_grad_norm=-1"),
    ),
    (
        "no dtype",
        lambda: made(gradient_dtype="fp8"),
        ("step.unknown_gradient_dtype", "gradient_dtype='fp8'", "fp32", "bf16"),
    ),
    (
        "no schedule",
        lambda: made("data=4,stage=2,microbatches=2", schedule=[["0F0"]]),
        ("schedule.missing_work", "0B0"),
    ),
    (
        "a lint by name",
        lambda: meshpar.lint("tiny", "data=2"),
        ("model.not_a_model", "str"),
    ),
    (
        "a lint of a text",
        lambda: meshpar.lint(build("test"), "data=2", seq="x"),
        ("value.not_whole_number", "seq='x'", 1),
    ),
    (
        "a lint of a dict of rules",
        lambda: meshpar.lint(build("test"), "data=2", {"mlp": None}),
        ("rules.not_rules", "dict", "meshpar.Rules"),
    ),
    ("an audit of a number", lambda: meshpar.audit(3), ("audit.no_mesh", "mesh=")),
    (
        "a target of a number",
        lambda: meshpar.audit(lambda x: x, BATCH["tokens"], target=3),
        ("audit.target_wrong_type", "int", "tpu:v5p:4x4x4"),
    ),
    (
        "no examples",
        lambda: meshpar.batch_shapes(build("test"), 0, seq=16),
        ("value.not_whole_number", "examples=0", 1),
    ),
    (
        "shapes of a name",
        lambda: meshpar.batch_shapes("test", 8, seq=16),
        ("model.not_a_model", "str", "meshpar.Model"),
    ),
    (
        "rules of a name",
        lambda: meshpar.Rules("fsdp"),
        ("rules.not_a_table", "'fsdp'"),
    ),
    ("rules of None", lambda: meshpar.Rules(None), ("rules.not_a_table", None)),
    (
        "a rule of 3",
        lambda: meshpar.Rules({"mlp": 3}),
        ("rules.not_mesh_axes", 3),
    ),
    (
        "a rule for 3",
        lambda: meshpar.Rules({3: "tensor"}),
        ("rules.axis_not_a_name", 3),
    ),
    (
        "a misspelt mesh axis",
        lambda: meshpar.Rules({"mlp": "tensr"}),
        ("rules.unknown_mesh_axis", "'mlp'", "'tensr'", "'tensor'"),
    ),
    (
        "an input of a name",
        lambda: Input("batch"),
        ("batch.input_axes_not_tuple", "'batch'"),
    ),
    ("an input of 3", lambda: Input(3), ("batch.input_axes_not_tuple", 3)),
    (
        "no kind",
        lambda: Input(("batch",), "integer"),
        ("batch.unknown_kind", "'integer'", "'int'"),
    ),
    (
        "below nothing",
        lambda: Input(("batch",), "int", below=0),
        ("value.not_whole_number", "below=0", 1),
    ),
    (
        "no devices",
        lambda: meshpar.emulate(0),
        ("mesh.device_count_below_one", "emulate(0)", 1),
    ),
    (
        "no cases",
        lambda: check_layouts(build("test"), num=0),
        ("value.not_whole_number", "num=0"),
    ),
    (
        "cases of a name",
        lambda: check_layouts("test"),
        ("model.not_a_model", "str", "meshpar.Model"),
    ),
    (
        "a batch of a number",
        lambda: check_layouts(build("test"), 3),
        ("batch.not_a_dict", "int"),
    ),
    (
        "a pipeline on no mesh",
        lambda: meshpar.pipeline_value_and_grad(
            len, len, mesh=3, num_microbatches=2, schedule="1f1b"
        ),
        ("mesh.not_a_mesh", "int", "make_mesh('stage=4')"),
    ),
]


@pytest.fixture
def refuses_in_a_line(refuses):
    """As `refuses`, of an error without a second line."""

    @contextlib.contextmanager
    def refusal(*key_and_values):
        with refuses(*key_and_values) as caught:
            yield
        assert "\n" not in str(caught.value)

    return refusal


@pytest.mark.parametrize(
    "call, refusal", [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_a_wrong_call_is_an_error_of_one_line(call, refusal, refuses_in_a_line):
    with refuses_in_a_line(*refusal):
        call()


@pytest.mark.parametrize(
    "arguments, refusal",
    [
        ((None, BATCH), ("step.not_a_state", "NoneType", "step.init")),
        (("state", None), ("batch.not_a_dict", "NoneType")),
        (
            ("state", {"tokens": BATCH["tokens"]}),
            ("batch.missing_array", "'targets'", ("batch", "seq")),
        ),
        (
            ("state", {**BATCH, "tokens": None}),
            ("batch.not_an_array", "batch['tokens']", "NoneType"),
        ),
        (
            ("state", {**BATCH, "tokens": np.zeros((8, 16))}),
            ("batch.wrong_dtype", "batch['tokens']", "float64", "'int'"),
        ),
        (
            ("state", {**BATCH, "tokens": BATCH["tokens"][:3]}),
            ("batch.sizes_disagree", "batch['tokens']", "'batch'", 8, 3),
        ),
        (
            ("state", {k: v[:3] for k, v in BATCH.items()}),
            ("batch.indivisible", "batch['tokens']", 3, 8),
        ),
    ],
)
def test_a_step_of_something_else_is_an_error_of_one_line(
    step, arguments, refusal, refuses_in_a_line
):
    state, batch = arguments
    state = step.state_shapes if state == "state" else state
    with refuses_in_a_line(*refusal):
        step(state, batch)


@pytest.mark.parametrize("seed", [-1, "0", 1.5, 2**40, True])
def test_a_seed_out_of_range_is_an_error_of_one_line(step, seed, refuses_in_a_line):
    whole = isinstance(seed, int) and seed is not True
    fault = "seed_out_of_range" if whole else "not_whole_number"
    with refuses_in_a_line(f"value.{fault}", f"seed={seed!r}", 2**32):
        step.init(seed=seed)


# Messages to who wrote the modules: of `from_nnx`, by the names of modules and methods.

INPUTS = {
    "tokens": Input(("batch", "seq"), "int", below=64),
    "targets": Input(("batch", "seq"), "int", below=64),
    "weights": Input(("batch", "seq"), is_weight=True),
}


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(64, 16, rngs=rngs)

    def embed(self, batch, scope):
        return self.table(batch["tokens"])

    def head(self, x, batch, scope):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            self.table.attend(x), batch["targets"]
        )
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    def join(self, stream, scope):
        return stream


class Block(nnx.Module):
    def __init__(self, rngs):
        named = {"out_sharding": ("embed", "mlp")}
        self.up = nnx.Linear(16, 16, kernel_metadata=named, rngs=rngs)

    def __call__(self, x, scope):
        return x + self.up(x)


class OfSizes(Block):
    def __init__(self, width, rngs):
        super().__init__(rngs)


class OneName(nnx.Module):
    def __init__(self, rngs):
        named = {"out_sharding": ("embed",)}
        self.up = nnx.Linear(16, 16, kernel_metadata=named, rngs=rngs)

    def __call__(self, x, scope):
        return x + self.up(x)


class NoScope(Block):
    def __call__(self, x):
        return x


class NoCall(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)


class Misspelt(Ends):
    embed = None

    def embd(self, batch, scope):
        return self.table(batch["tokens"])


class NoBatch(Ends):
    def head(self, x, scope):
        return x.sum(), x.sum()


def built(**options):
    chosen = {"ends": Ends, "block": Block, "num_layers": 2, "inputs": INPUTS}
    return from_nnx(**{**chosen, **options})


def grouped(**options):
    groups = {"layers": Blocks(block=Block, num_layers=2, **options)}
    return built(block=None, num_layers=None, groups=groups)


MODULES = [
    ({"ends": None}, ("model.builder_not_callable", "from_nnx(ends=None)")),
    (
        {"ends": lambda rngs: 3},
        ("model.not_a_module", "from_nnx(ends=...)", "int", "flax.nnx.Module"),
    ),
    (
        {"block": OfSizes},
        (
            "model.wrong_builder_arguments",
            "from_nnx(block=OfSizes)(self, width, rngs)",
        ),
    ),
    (
        {"block": OneName},
        (
            *("model.wrong_number_of_axes", "from_nnx(block=OneName)", "up.kernel"),
            *((16, 16), 2, ("embed",), 1),
        ),
    ),
    (
        {"block": NoScope},
        (
            *("model.wrong_method_arguments", "from_nnx(block=NoScope)"),
            *("__call__(self, x)", "__call__(stream, scope)"),
        ),
    ),
    (
        {"block": NoCall},
        ("model.missing_method", "from_nnx(block=NoCall)", "__call__(stream, scope)"),
    ),
    (
        {"ends": Misspelt},
        ("model.missing_method", "embed(batch, scope)", "'embd'"),
    ),
    (
        {"ends": NoBatch},
        (
            *("model.wrong_method_arguments", "from_nnx(ends=NoBatch)"),
            *("head(self, x, scope)", "head(stream, batch, scope)"),
        ),
    ),
    ({"num_layers": "2"}, ("value.not_whole_number", "num_layers='2'", 1)),
    ({"num_layers": 0}, ("value.not_whole_number", "num_layers=0", 1)),
    ({"inputs": 3}, ("batch.inputs_not_a_dict", "int", "meshpar.Input")),
    (
        {"inputs": {"tokens": ("batch",)}},
        ("batch.not_an_input", "inputs['tokens']", ("batch",), "meshpar.Input"),
    ),
    (
        {"auxiliary": {"z": "x"}},
        ("model.auxiliary_not_coefficients", "from_nnx(auxiliary={'z': 'x'})"),
    ),
    ({"block": None}, ("model.block_or_groups", "block=", "num_layers=", "groups=")),
]


@pytest.mark.parametrize("options, refusal", MODULES)
def test_what_is_no_model_is_told_in_the_words_of_from_nnx(
    options, refusal, refuses_in_a_line
):
    with refuses_in_a_line(*refusal):
        built(**options)


def test_a_misspelt_enter_is_told_with_the_methods_of_the_ends(refuses_in_a_line):
    refusal = ("model.missing_method", "jion(stream, scope)", "'join'", "embed, head")
    with refuses_in_a_line(*refusal):
        grouped(enter="jion")


def test_a_module_in_place_of_its_class_is_told(refuses_in_a_line):
    with nnx.use_eager_sharding(False):
        block = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    with refuses_in_a_line("model.module_already_built", "from_nnx(block=Block(...))"):
        built(block=block)


class OneScalar(Ends):
    def head(self, x, batch, scope):
        return x.sum()


class Nothing(Ends):
    def embed(self, batch, scope):
        return None


class Absent(Ends):
    def embed(self, batch, scope):
        return self.table(batch["token"])


class Wider(Block):
    def __call__(self, x, scope):
        return jnp.concatenate([x, x], -1)


class Summing(Block):
    def __call__(self, x, scope):
        return x, {"router": x.sum()}


@pytest.mark.parametrize(
    "options, refusal",
    [
        (
            {"ends": OneScalar},
            ("model.head_not_scalars", "from_nnx(ends=OneScalar)", "head", [()]),
        ),
        (
            {"ends": Nothing},
            ("model.not_a_stream", "from_nnx(ends=Nothing)", "embed", None),
        ),
        ({"ends": Absent}, ("batch.missing_array", "batch['token']", "'tokens'")),
        (
            {"block": Wider},
            (
                *("model.stream_changed", "from_nnx(block=Wider)", "__call__"),
                *("float32(8, 16, 16)", "float32(8, 16, 32)"),
            ),
        ),
        (
            {"block": Summing},
            (
                *("model.wrong_sums", "from_nnx(block=Summing)", "__call__"),
                *({"router": ()}, []),
            ),
        ),
    ],
)
def test_what_a_method_returns_is_told_by_its_name(options, refusal, refuses_in_a_line):
    step = make_train_step(built(**options), SGD, "data=1", devices=jax.devices()[:1])
    with refuses_in_a_line(*refusal):
        step.compile(BATCH)
    (finding,) = meshpar.lint(built(**options), "data=1").findings
    key, *values = refusal
    assert finding.key == key
    of_batch = [value for value in values if "(8" not in str(value)]
    assert all(names(finding.message, value) for value in of_batch), finding.message
