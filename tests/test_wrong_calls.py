"""Wrong calls and command lines: each is told in one line, with a way out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar import Blocks, Input, InputError, Layout, from_nnx, make_train_step
from meshpar.cli.main import main
from meshpar.models.presets import build
from meshpar.testing import check_layouts

# Command lines. Files that a row names are made by `folder`.

PLAN = "plan --model llama3-8b --devices 8 --global-batch 8"
ESTIMATE = "estimate --model llama3-8b --layout"
SCHEDULE = "schedule --schedule 1f1b --stages 4 --microbatches 8"
LINT = "lint --preset tiny --layout data=2"
AUDIT = "audit --preset tiny --layout data=2"

# Name of a file -> what it changes of an H100, and what is told of it.
DEVICE_FILES = {
    name: (f'like = "h100-80gb"\n{words}', message)
    for name, words, message in (
        ("slow", "link_bytes_per_s = 1e-300", "link_bytes_per_s=1e-300: must be at le"),
        ("fast", "network_bytes_per_s = 1e30", "network_bytes_per_s=1e+30: must be at"),
        ("nan", "host_bytes_per_s = nan", "host_bytes_per_s=nan must be a positive"),
        ("large", "memory_bytes = 1e300", "memory_bytes=1e+300: must be at least 1000"),
        ("dims", "torus_dims = 9", "torus_dims=9: must be at least 0 and at most 6"),
        ("joined", "domain_devices = 99999999", "domain_devices=1e+08: must be at lea"),
        ("late", "[efficiency]\nlaunch_s = 1e6", "launch_s=1e+06: must be at least 0"),
        ("far", "[efficiency]\nnetwork_hop_s = 60", "network_hop_s=60: must be at lea"),
        ("cores", "[efficiency]\ncollective_cores = 15", "collective_cores=15: must"),
        ("lost", "[efficiency]\nmatmul = nan", "matmul=nan: must be above 0 and at mo"),
        ("peak", "[peak_flops]\nbf16 = 1e40", "peak_flops bf16=1e+40: must be at lea"),
    )
}

COMMANDS = [
    # Misspelt words, with the nearest.
    ("lnt", "invalid choice: 'lnt'; did you mean 'lint'"),
    ("--vresion", "unrecognized arguments: --vresion (did you mean --version?)"),
    ("plan --devicse 8", "--devicse 8 (did you mean --devices?)"),
    (f"{PLAN} --hardware h1000", "no hardware 'h1000'; did you mean 'h100'"),
    (f"{PLAN} --keep tensr=8", "no key 'tensr'; did you mean 'tensor'"),
    (f"{PLAN} --forbid tensr", "no mesh axis; did you mean 'tensor'"),
    (f"{PLAN} --execution megatro", "no execution 'megatro'; did you mean 'megatron"),
    ("plan --model llama-8b --global-batch 8", "'llama-8b'; did you mean 'llama3-8b'"),
    (f"{ESTIMATE} fsdp=8,remat=ful", "remat=ful: must be one of none, selective"),
    (f"{ESTIMATE} stage=2,schedule=1fb1", "no schedule '1fb1'; did you mean '1f1b'"),
    ("schedule --schedule 1f1bb --stages 4 --microbatches 8", "did you mean '1f1b'"),
    ("lint --preset tny --layout data=2", "no preset 'tny'; did you mean 'tiny'"),
    (f"{LINT} --rules fsd", "no rules 'fsd'; did you mean 'fsdp'"),
    (f"{AUDIT} --target gpu:h10:1x2", "no gpu:h10; did you mean 'gpu:h100'"),
    ("fuzz --preset tiny --layout dat=2", "no key 'dat'; did you mean 'data'"),
    # Numbers out of range, and what is no number.
    (f"{PLAN} --plans 0", "--plans: '0' must be a whole number of at least 1"),
    (f"{PLAN} --max-memory-gib nan", "--max-memory-gib: 'nan' must be above 0"),
    (f"{PLAN} --keep data=-1", "data=-1 is kept, but a search gives every mesh axis"),
    (f"{PLAN} --keep tensor=3", "no layout of 8 devices has tensor=3"),
    (f"{PLAN} --hosts 3", "8 devices do not divide over 3 hosts"),
    (f"{ESTIMATE} fsdp=0", "fsdp=0: must be a whole number of at least 1"),
    (f"{ESTIMATE} fsdp=-1", "'fsdp' is -1, so its size depends on the devices; give"),
    (f"{ESTIMATE} fsdp=8 --devices 4", "'fsdp=8' needs 8 devices, but there are 4"),
    (f"{ESTIMATE} fsdp=8 --global-batch 3", "3 sequences do not divide over data=1"),
    (f"{ESTIMATE} tensor=3", "heads=32 does not divide over tensor=3"),
    (f"{ESTIMATE} stage=64,microbatches=64", "64 stages, but the model has 32 layers"),
    (f"{SCHEDULE} --forward-ms 1e400", "'1e400' must be milliseconds, 0 or more and"),
    (f"{SCHEDULE} --forward-ms 1/2", "2 times for 4 ranks"),
    (f"{SCHEDULE} --chunks 2", "schedule '1f1b' has one stage a rank"),
    (f"{LINT} --large-bytes -5", "--large-bytes: '-5' must be a whole number"),
    (f"{AUDIT} --timeout nan", "--timeout: 'nan' must be above 0"),
    (f"{AUDIT} --memory-gib inf", "--memory-gib: 'inf' must be above 0"),
    (f"{AUDIT},tensor=3 --devices 8", "needs 6 devices, but there are 8"),
    (f"{AUDIT},tensor=3", "does not divide over mesh axis 'tensor' of size 3; blocks."),
    ("fuzz --preset tiny --devices -1", "--devices: '-1' must be a whole number"),
    ("fuzz --preset tiny --seed -1", "--seed -1: must be at least 0"),
    (f"{PLAN} --seq 99999999999999999999", "--seq: '99999999999999999999' must be a"),
    (f"{PLAN} --seq 9999999999", "9999999999 tokens: give at most 1000000000 each"),
    (f"{PLAN} --seq {'9' * 5000}", f"--seq: '{'9' * 40}...' must be a whole number"),
    ("plan --model gpt2 --devices 8 --global-batch 8 --seq 4096", "seq=1024 learned"),
    (f"{ESTIMATE} fsdp=8,microbatches={10**20}", "tokens: give at most 1000000000"),
    (f"{ESTIMATE} fsdp={10**20}", "devices or hosts: give at most 1000000"),
    ("plan --model llama3-8b --devices 735134400 --global-batch 8", "at most 1000000"),
    ("show --model llama3-8b --layout fsdp=-1 --json", "give --devices N, or give the"),
    (f"{ESTIMATE} fsdp=-1 --hosts 2", "'fsdp' is -1, so its size depends on the dev"),
    (f"{SCHEDULE} --hop-ms nan", "'nan' must be milliseconds, 0 or more and at most"),
    (
        "schedule --schedule 1f1b --stages 1000000 --microbatches 1000000",
        "1000000000000 forwards; give at most 1000000",
    ),
    (f"{PLAN} --tokens nan", "--tokens: 'nan' must be above 0, and finite"),
    (f"{PLAN} --tokens 1e12 --price -2", "--price: '-2' must be above 0, and finite"),
    (f"{PLAN} --tokens 1e12 --mtbf 0", "--mtbf: '0' must be above 0, and finite"),
    (f"{PLAN} --price 2", "--price is of a whole training; give --tokens N"),
    (f"{PLAN} --mtbf 24", "--mtbf is of a whole training; give --tokens N"),
    (f"{PLAN} --tokens 1e12 --restart-s 9", "--restart-s matters where devices fail"),
    (f"{PLAN} --tokens 1e12 --mtbf 1e-9", "the training never ends; give a longer"),
    (f"{PLAN} --measure 0", "--measure: '0' must be a whole number of at least 1"),
    # Residuals that no block names.
    (f"{PLAN} --keep remat=save:nosuch", "no block names a residual 'nosuch'; known:"),
    (f"{PLAN} --keep remat=offload:mlp_up", "'mlp_up'; did you mean 'mlp_gate_up'"),
    (f"{PLAN} --layout remat=save:nosuch", "no block names a residual 'nosuch'; known"),
    (f"{ESTIMATE} fsdp=8,remat=save:nosuch", "no block names a residual 'nosuch'; kn"),
    # What must be said, and what excludes itself.
    ("", "the following arguments are required: COMMAND"),
    ("plan --model llama3-8b --devices 8", "a plan depends on the batch; give --glob"),
    ("estimate --model llama3-8b", "arguments are required: --layout"),
    ("lint --layout data=2", "no model is chosen; give --preset NAME or --model"),
    (f"{PLAN} --forbid tensor --keep tensor=2", "is kept and 'tensor' is forbidden"),
    ("schedule --schedule 1f1b", "how large? give --stages N and --microbatches N"),
    (f"{ESTIMATE} fsdp=8,fsdp=8", "'fsdp' is given twice"),
    (f"{ESTIMATE} fsdp", "'fsdp' is not key=value"),
    (f"{ESTIMATE} data=2,chunks=2", "chunks changes nothing while stage=1"),
    (f"{AUDIT} --recipe own:none", "has its own model and batch; leave --preset"),
    # Files.
    (f"{PLAN} --html no/such.html", "--html: 'no/such.html': there is no folder 'no'"),
    (f"{PLAN} --html .", "--html: '.' is a folder; name a file in it"),
    (f"{PLAN} --html /proc/no.html", "--html: '/proc/no.html' cannot be written (No s"),
    ("show --preset tiny --layout data=2 --html no/such.html", "there is no folder"),
    (f"{SCHEDULE} --plot no/such.svg", "--plot: 'no/such.svg': there is no folder"),
    (f"{SCHEDULE} --plot x.pdf", "--plot 'x.pdf': no picture of that kind"),
    (f"{SCHEDULE} --trace no/such.json", "--trace: 'no/such.json': there is no folder"),
    ("calibrate --output no/such.toml", "--output: 'no/such.toml': there is no folder"),
    ("schedule --schedule missing.csv", "No such file or directory: 'missing.csv'"),
    ("schedule --schedule wrong.csv", "rank 0: 'zz' is no action; write the stage"),
    ("schedule --schedule bytes.csv", "schedule 'bytes.csv' is no text"),
    (f"{PLAN} --hardware missing.toml", "cannot read 'missing.toml' as TOML"),
    (f"{PLAN} --hardware wrong.toml", "cannot read 'wrong.toml' as TOML: Invalid"),
    *(
        (f"{PLAN} --hardware {name}.toml", message)
        for name, (_, message) in DEVICE_FILES.items()
    ),
    ("lint --model wrong.json --layout data=2", "cannot read 'wrong.json' as JSON"),
    ("lint --model-from own:none --layout data=2", "gives a NoneType, not a meshpar.M"),
    ("lint --model-from own:no --layout data=2", "module 'own' has no attribute 'no'"),
]


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


@pytest.mark.parametrize("line, message", COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_wrong_command_line_is_one_line_on_stderr_and_status_2(
    line, message, folder, capsys
):
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("meshpar")
    assert captured.err.count("\n") == 1
    assert message in captured.err


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
    ("a layout of no text", lambda: Layout.parse(3), "layout is a int; give its text"),
    ("a key of no layout", lambda: Layout.parse("dta=2"), "did you mean 'data'"),
    ("a size of text", lambda: Layout(data="2"), "data='2': must be a whole number"),
    (
        "devices of text",
        lambda: Layout(data=-1).resolve("8"),
        "num_devices='8': must be a whole number",
    ),
    (
        "a model by name",
        lambda: make_train_step("tiny", SGD, "data=8"),
        "model is a str; give a meshpar.Model",
    ),
    (
        "no optimizer",
        lambda: make_train_step(build("test"), "adamw", "data=8"),
        "optimizer is 'adamw'; give an optax optimizer",
    ),
    ("a layout of nothing", lambda: made(None), "layout is a NoneType; give"),
    ("too many devices", lambda: made("data=16"), "needs 16 devices, but there are 8"),
    ("a number of devices", lambda: made(devices=2), "devices=2: give a list of JAX's"),
    (
        "a mesh of text",
        lambda: made(mesh="data=8"),
        "mesh is a str; give one of make_m",
    ),
    (
        "rules of a dict",
        lambda: made(rules={"mlp": None}),
        "rules is a dict; give mesh",
    ),
    ("rules by name", lambda: made(rules="fsdp"), "rules is a str; give meshpar.Rules"),
    ("a limit of text", lambda: made(max_grad_norm="1"), "max_grad_norm='1': must be"),
    ("a limit below 0", lambda: made(max_grad_norm=-1), "max_grad_norm=-1: must be"),
    ("no dtype", lambda: made(gradient_dtype="fp8"), "gradient_dtype='fp8': must be"),
    (
        "no schedule",
        lambda: made("data=4,stage=2,microbatches=2", schedule=[["0F0"]]),
        "",
    ),
    ("a lint by name", lambda: meshpar.lint("tiny", "data=2"), "model is a str; give"),
    (
        "a lint of a text",
        lambda: meshpar.lint(build("test"), "data=2", seq="x"),
        "seq='x': must be a whole number of at least 1",
    ),
    (
        "a lint of a dict of rules",
        lambda: meshpar.lint(build("test"), "data=2", {"mlp": None}),
        "rules is a dict; give meshpar.Rules",
    ),
    ("an audit of a number", lambda: meshpar.audit(3), ""),
    (
        "a target of a number",
        lambda: meshpar.audit(lambda x: x, BATCH["tokens"], target=3),
        "target is a int; write for example tpu:v5p",
    ),
    (
        "no examples",
        lambda: meshpar.batch_shapes(build("test"), 0, seq=16),
        "examples=0: must be a whole number of at least 1",
    ),
    (
        "shapes of a name",
        lambda: meshpar.batch_shapes("test", 8, seq=16),
        "model is a str; give a meshpar.Model",
    ),
    ("rules of a name", lambda: meshpar.Rules("fsdp"), "rules of 'fsdp'; give logical"),
    ("rules of None", lambda: meshpar.Rules(None), "rules of None; give logical axis"),
    ("a rule of 3", lambda: meshpar.Rules({"mlp": 3}), "a rule gives 3; give a mesh"),
    (
        "a rule for 3",
        lambda: meshpar.Rules({3: "tensor"}),
        "a rule is for 3; give the name",
    ),
    (
        "a misspelt mesh axis",
        lambda: meshpar.Rules({"mlp": "tensr"}),
        "'tensr'; did you mean 'tensor'",
    ),
    ("an input of a name", lambda: Input("batch"), "logical axes are 'batch'; give a"),
    ("an input of 3", lambda: Input(3), "logical axes are 3; give a tuple"),
    ("no kind", lambda: Input(("batch",), "integer"), "no kind 'integer' of numbers"),
    (
        "below nothing",
        lambda: Input(("batch",), "int", below=0),
        "below=0: must be a whole number of at least 1",
    ),
    ("no devices", lambda: meshpar.emulate(0), "emulate(0): needs at least 1 device"),
    ("no cases", lambda: check_layouts(build("test"), num=0), "num=0: must be a whole"),
    (
        "cases of a name",
        lambda: check_layouts("test"),
        "model is a str; give a meshpar",
    ),
    (
        "a batch of a number",
        lambda: check_layouts(build("test"), 3),
        "batch is a int; give name -> array",
    ),
    (
        "a pipeline on no mesh",
        lambda: meshpar.pipeline_value_and_grad(
            len, len, mesh=3, num_microbatches=2, schedule="1f1b"
        ),
        "mesh is a int; give one",
    ),
]


def assert_one_line(call, message):
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert message in text


@pytest.mark.parametrize(
    "call, message", [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_a_wrong_call_is_an_error_of_one_line(call, message):
    assert_one_line(call, message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((None, BATCH), "state is a NoneType; give what step.init or an earlier step"),
        (("state", None), "the batch is a NoneType; give a dict of arrays by name"),
        (("state", {"tokens": BATCH["tokens"]}), "but no 'targets', which the model"),
        (
            ("state", {**BATCH, "tokens": None}),
            "batch['tokens'] is a NoneType; give an",
        ),
        (("state", {**BATCH, "tokens": np.zeros((8, 16))}), "has dtype float64, but"),
        (("state", {**BATCH, "tokens": BATCH["tokens"][:3]}), "is 8 in one and 3 in"),
        (("state", {k: v[:3] for k, v in BATCH.items()}), "do not divide over 8"),
    ],
)
def test_a_step_of_something_else_is_an_error_of_one_line(step, arguments, message):
    state, batch = arguments
    state = step.init(seed=0) if state == "state" else state
    assert_one_line(lambda: step(state, batch), message)


@pytest.mark.parametrize("seed", [-1, "0", 1.5, 2**40, True])
def test_a_seed_out_of_range_is_an_error_of_one_line(step, seed):
    assert_one_line(lambda: step.init(seed=seed), f"seed={seed!r}: must be")


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
    ({"ends": None}, "from_nnx(ends=None): give what builds a module from nnx.Rngs"),
    ({"ends": lambda rngs: 3}, "from_nnx(ends=...) builds a int, no flax.nnx.Module"),
    (
        {"block": OfSizes},
        "from_nnx(block=OfSizes)(self, width, rngs): it is called with",
    ),
    ({"block": OneName}, "from_nnx(block=OneName): up.kernel of shape (16, 16) has 2"),
    (
        {"block": NoScope},
        "from_nnx(block=NoScope): __call__(self, x) is called as __ca",
    ),
    (
        {"block": NoCall},
        "from_nnx(block=NoCall): the module has no method __call__(str",
    ),
    ({"ends": Misspelt}, "no method embed(batch, scope); did you mean 'embd'"),
    (
        {"ends": NoBatch},
        "from_nnx(ends=NoBatch): head(self, x, scope) is called as hea",
    ),
    ({"num_layers": "2"}, "num_layers='2': must be a whole number of at least 1"),
    ({"num_layers": 0}, "num_layers=0: must be a whole number of at least 1"),
    ({"inputs": 3}, "inputs is a int; give a dict of name -> meshpar.Input"),
    (
        {"inputs": {"tokens": ("batch",)}},
        "inputs['tokens'] is ('batch',); give meshpar",
    ),
    ({"auxiliary": {"z": "x"}}, "from_nnx(auxiliary={'z': 'x'}): give a dict of name"),
    ({"block": None}, "give from_nnx either block= and num_layers=, or groups="),
]


@pytest.mark.parametrize("options, message", MODULES)
def test_what_is_no_model_is_told_in_the_words_of_from_nnx(options, message):
    assert_one_line(lambda: built(**options), message)


def test_a_misspelt_enter_is_told_with_the_methods_of_the_ends():
    assert_one_line(lambda: grouped(enter="jion"), "jion(stream, scope); did you mean")


def test_a_module_in_place_of_its_class_is_told():
    with nnx.use_eager_sharding(False):
        block = Block(nnx.Rngs(0))
    assert_one_line(lambda: built(block=block), "from_nnx(block=Block(...)): a module")


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
    "options, message",
    [
        (
            {"ends": OneScalar},
            "from_nnx(ends=OneScalar): head returns arrays of shapes",
        ),
        ({"ends": Nothing}, "from_nnx(ends=Nothing): embed returns None; it must"),
        ({"ends": Absent}, "the model reads batch['token'], but the batch has"),
        (
            {"block": Wider},
            "from_nnx(block=Wider): __call__ maps float32(8, 16, 16) to",
        ),
        (
            {"block": Summing},
            "from_nnx(block=Summing): __call__ returns x and {'router'",
        ),
    ],
)
def test_what_a_method_returns_is_told_by_its_name(options, message):
    step = make_train_step(built(**options), SGD, "data=1", devices=jax.devices()[:1])
    assert_one_line(lambda: step.compile(BATCH), message)
    (finding,) = meshpar.lint(built(**options), "data=1").findings
    assert message.partition("(8")[0] in finding.message
