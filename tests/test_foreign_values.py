"""Values in files of others that have another type, or a size that cannot be."""

import json
from dataclasses import asdict

import pytest

from meshpar.data.tokenizer import FileTokenizer
from meshpar.errors import DataError
from meshpar.foreign_files import parse_json
from meshpar.model.lora import LoRA
from meshpar.models.convert.hf_config import config_from_json
from meshpar.models.convert.run import read_checkpoint
from meshpar.models.convert.stored_config import read_lora
from meshpar.models.layers.rope import RopeScaling, YarnScaling, rope_frequencies
from meshpar.models.presets import PRESETS
from meshpar.planner.machine.clusters import load_device
from meshpar.planner.machine.execution import load_execution
from meshpar.recipes.config import RunConfig
from meshpar.recipes.finetune import FinetuneConfig, template_date
from meshpar.train.checkpoint import CheckpointError, Checkpoints
from meshpar.train.checkpoint.contents import check_description, read_contents
from meshpar.train.checkpoint.files import NAME, damage
from tests.chat_cases import write_folder
from tests.test_checkpoint import small_state
from tests.transformers_cases import CONFIGS

READ = "checkpoint.unreadable"


@pytest.mark.parametrize("inner", ["[", '{"a":', '[1, {"a":'])
def test_json_nested_deeper_than_any_settings_is_refused(inner):
    """All that reads or prints its values would go as deep."""
    closing = {"[": "]", "{": "}"}
    ends = "".join(closing[one] for one in reversed(inner) if one in closing)
    deep = 150 // sum(one in closing for one in inner)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(inner * deep + "1" + ends * deep)
    assert parse_json(inner * 20 + "1" + ends * 20)
    assert len(parse_json(json.dumps([[1]] * 500))) == 500


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of checkpoints of small arrays, whose bytes no test changes."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(small_state(3), {"layout": "data=1"})
    return folder


@pytest.fixture
def changed(saved, tmp_path):
    """Copy the checkpoint without checksums, a JSON file of it with other values."""
    import shutil

    def change(name, **values):
        to = shutil.copytree(saved, tmp_path / "checkpoints")
        (to / "3" / NAME).unlink()
        said = json.loads((to / "3" / name).read_text())
        (to / "3" / name).write_text(json.dumps({**said, **values}))
        return to

    return change


@pytest.mark.parametrize("layout", [3, ["data=1"], {}, True])
def test_a_checkpoint_whose_layout_is_no_text_is_refused(changed, refuses, layout):
    folder = changed("run/metadata", layout=layout)
    with refuses(READ, "layout", kind=CheckpointError, words=False):
        read_contents(folder)


def test_a_checkpoint_of_something_else_than_arrays_is_refused(changed, refuses):
    entry = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "scalar", "skip_deserialize": False},
    }
    folder = changed("state/_METADATA", tree_metadata={"('w',)": entry})
    with refuses(READ, kind=CheckpointError, words=False) as caught:
        read_contents(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["x", [1], 1.5])
def test_a_checkpoint_that_orbax_cannot_list_is_refused(changed, refuses, value):
    folder = changed("_CHECKPOINT_METADATA", init_timestamp_nsecs=value)
    with refuses(READ, str(folder), kind=CheckpointError, words=False):
        Checkpoints(folder)


@pytest.mark.parametrize("piece", [("a", 1, 1 << 70, 1, 0), ("a\0b", 1, 0, 1, 0)])
def test_checksums_of_what_no_file_can_be_are_damage(tmp_path, piece):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / NAME).write_text(json.dumps([piece]))
    assert "cannot be read" in damage(tmp_path)


@pytest.mark.parametrize(
    "name, value",
    [
        *(("model_sizes", 1), ("model_sizes", [1]), ("lora", "x"), ("seed", True)),
        *(("layout", 1), ("text", "a.txt"), ("text", [1]), ("stop_tokens", ["0"])),
        *(("windows", 1.5), ("learning_rate", "1"), ("tokenizer", 3), ("seq", None)),
    ],
)
def test_a_description_of_other_types_than_a_run_writes_is_refused(
    name, value, refuses
):
    with refuses(READ, name, kind=CheckpointError, words=False):
        check_description({"layout": "data=1", name: value}, "checkpoint of step 3")


def test_a_description_may_lack_names_and_have_others():
    said = {"text": ["a"], "tokenizer": None, "decay_steps": None, "mine": [1, {}]}
    check_description(said, "checkpoint of step 3")


@pytest.mark.parametrize("values", [{"rnk": 8}, {"rank": 8, "x": 1}])
def test_lora_of_other_fields_is_refused(values, refuses):
    with refuses("weights.unknown_stored_fields", "LoRA", words=False):
        read_lora(values)
    assert read_lora({"rank": 4}) == LoRA(rank=4)


def test_a_chat_date_that_is_none_is_refused(tmp_path, refuses):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(small_state(1), {"chat_date": "yesterday"})
    config = FinetuneConfig(from_weights=tmp_path, out=tmp_path, resume=True)
    with refuses(READ, "'yesterday'", words=False):
        template_date(config)


@pytest.mark.parametrize("changes", [{"model": {"unk_token": "absent"}}])
def test_a_tokenizer_that_fails_at_a_text_is_told(tmp_path, refuses, changes):
    pytest.importorskip("tokenizers")
    folder = write_folder(tmp_path, {})
    said = json.loads((folder / "tokenizer.json").read_text())
    said["model"] |= changes["model"]
    (folder / "tokenizer.json").write_text(json.dumps(said))
    with refuses("data.tokenizer_fails", words=False, kind=DataError):
        FileTokenizer(folder / "tokenizer.json").encode(["unheard"])


@pytest.mark.parametrize(
    "key, value",
    [
        ("tokenizer.ggml.eos_token_id", 0.5),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.chat_template", 7),
    ],
)
def test_a_key_of_a_gguf_chat_with_another_type_is_refused(
    tmp_path, refuses, key, value
):
    pytest.importorskip("gguf")
    from meshpar.models.convert.chat_template import read_template
    from tests.file_fuzz.gguf_bytes import gguf_bytes

    values = {"tokenizer.ggml.tokens": ["a"], "tokenizer.chat_template": "x"}
    content = gguf_bytes(
        {"values": values | {key: value}, "tensors": [], "data_bytes": 0}
    )
    (tmp_path / "a.gguf").write_bytes(content)
    with refuses("weights.unsupported_gguf_value", key, words=False):
        read_template(tmp_path / "a.gguf")


def test_a_gguf_tokenizer_that_the_library_refuses_is_told(tmp_path, refuses):
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    from meshpar.models.convert.gguf_file import GGUFFile
    from meshpar.models.convert.gguf_tokenizer import gguf_tokenizer
    from tests.file_fuzz.gguf_bytes import gguf_bytes

    values = {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"},
        **{"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["b c"]},
        "tokenizer.ggml.token_type": [1],
    }
    content = gguf_bytes({"values": values, "tensors": [], "data_bytes": 0})
    (tmp_path / "a.gguf").write_bytes(content)
    with refuses("weights.broken_tokenizer", words=False):
        gguf_tokenizer(GGUFFile(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "changes",
    [{"beta_fast": -1.0}, {"beta_slow": 0.0}, {"original_seq": 0}],
)
def test_yarn_of_numbers_that_have_no_logarithm_is_refused(changes, refuses):
    with pytest.raises(ValueError, match=next(iter(changes))):
        YarnScaling(**{"factor": 4.0, "original_seq": 16, **changes})
    with pytest.raises(ValueError, match="original_seq"):
        RopeScaling(original_seq=0)
    yarn = YarnScaling(factor=4.0, original_seq=16)
    with refuses("value.out_of_range", 1.0, words=False):
        rope_frequencies(8, 1.0, yarn)


@pytest.mark.parametrize("name", ["factor", "mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", ["4", [4], True])
def test_yarn_of_a_config_reads_numbers_alone(tmp_path, refuses, name, value):
    config = json.loads(json.dumps(CONFIGS["deepseek_v3"]))
    config["rope_parameters"][name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refuses("value.not_number", name, words=False):
        config_from_json(tmp_path / "config.json")


@pytest.mark.parametrize("value", ["inf", "nan", "1e400"])
def test_a_whole_number_of_an_execution_is_finite(tmp_path, refuses, value):
    (tmp_path / "a.toml").write_text(f'like = "megatron-core"\nrails = {value}\n')
    with refuses("plan.wrong_field_type", words=False):
        load_execution(tmp_path / "a.toml")


def test_a_checkpoint_of_other_arrays_than_its_model_has_is_refused(tmp_path, refuses):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        said = {"model_sizes": asdict(PRESETS["test"]), "layout": "data=1"}
        checkpoints.save(small_state(1), said)
    with refuses("checkpoint.other_model", "no such array", words=False):
        read_checkpoint(tmp_path, None, instead="")


@pytest.mark.parametrize("name", ["steps", "save_every", "seed", "sample_tokens"])
def test_a_count_beyond_32_bits_is_refused(name, refuses):
    with refuses("value.above_limit", name, words=False):
        RunConfig(**{name: 10**30})


@pytest.mark.parametrize("table", ["peak_flops", "attention_kernels"])
def test_a_table_of_a_device_is_one(tmp_path, refuses, table):
    (tmp_path / "a.toml").write_text(f'like = "h100-80gb"\n{table} = "x"\n')
    with refuses("hardware.not_a_table", table, words=False):
        load_device(tmp_path / "a.toml")
