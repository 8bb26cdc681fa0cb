"""Every format gives back the tokens that went in, and tells what is wrong."""

import gzip
import json
import os
import struct

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tokenizers import Tokenizer, models

from meshpar.data import megatron, tokenizer
from meshpar.data.documents import jsonl_documents, parquet_documents, read_text
from meshpar.data.megatron import MegatronWriter, read_megatron
from meshpar.data.sources import DataSource, check_weights
from meshpar.data.token_files import TokenStream, read_nanogpt
from meshpar.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TokenCache,
    whole_texts_tokenizer,
)
from meshpar.errors import DataError, Skipped
from tests.bpe import write_bpe

TEXTS = ["To be, or not to be.", "Ω and λ,\nin two lines", "x"]


def documents(file):
    """The tokens of each document of a file."""
    return [
        file.read(start, stop).tolist()
        for start, stop in zip(file.bounds[:-1], file.bounds[1:], strict=True)
    ]


def write_pair(path, texts, dtype="<u2"):
    with MegatronWriter(path, np.dtype(dtype)) as writer:
        for tokens in texts:
            writer.add(np.array(tokens))
    return path


def write_texts(folder, format, texts):
    """A file of texts, and what finds them in it."""
    path = folder / f"a.{format}"
    lines = "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in texts)
    if format == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif format == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines if format == "jsonl" else texts[0])
    return path


def cached(folder, path, *, tokenizer=None, field="text", **options):
    cache = TokenCache(
        folder=folder / "tokens", tokenizer=tokenizer or ByteTokenizer(), **options
    )
    ((file, format),) = DataSource(path=str(path)).files()
    return cache.tokenized(file, format, field)


# Tokens out are tokens in.


@pytest.mark.parametrize("format", ["txt", "jsonl", "jsonl.gz", "parquet"])
def test_a_file_of_texts_gives_their_bytes_each_with_an_end(format, tmp_path):
    path = write_texts(tmp_path, format, TEXTS)
    wanted = TEXTS[:1] if format == "txt" else TEXTS
    found = documents(cached(tmp_path, path))
    assert found == [[*text.encode(), 0] for text in wanted]


def test_a_tokenizers_file_gives_its_tokens_each_with_its_end(tmp_path):
    tokenizer = FileTokenizer(write_bpe(tmp_path / "tok.json", TEXTS))
    found = documents(
        cached(tmp_path, write_texts(tmp_path, "jsonl", TEXTS), tokenizer=tokenizer)
    )
    assert [one[-1] for one in found] == [tokenizer.eos] * len(TEXTS)
    assert [tokenizer.decode(one[:-1]) for one in found] == TEXTS
    assert max(map(max, found)) < tokenizer.vocab


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_tokenizers_file_that_cuts_or_pads_loses_and_adds_no_token(setting, tmp_path):
    plain = write_bpe(tmp_path / "plain.json", TEXTS)
    tokenizer = Tokenizer.from_file(str(plain))
    tokenizer.enable_truncation(2)
    if setting == "padding":
        tokenizer.no_truncation()
        tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "set.json"))
    texts = write_texts(tmp_path, "jsonl", TEXTS)
    found, wanted = (
        documents(cached(tmp_path, texts, tokenizer=FileTokenizer(tmp_path / name)))
        for name in ("set.json", "plain.json")
    )
    assert found == wanted
    prompts = whole_texts_tokenizer(tmp_path / "set.json")
    assert prompts.encode(TEXTS[0]).ids == wanted[0][:-1]


def test_tokens_of_an_earlier_way_to_make_them_are_not_taken(tmp_path, monkeypatch):
    path = write_texts(tmp_path, "jsonl", TEXTS)
    cache = TokenCache(folder=tmp_path, tokenizer=ByteTokenizer())
    now = cache.kept_as(path, "jsonl", "text")
    monkeypatch.setattr(tokenizer, "_VERSION", 1)
    assert cache.kept_as(path, "jsonl", "text") != now


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        arrays.arrays(np.int64, st.integers(0, 9), elements=st.integers(0, 250)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["<u1", "<u2", "<i4"]),
)
def test_a_megatron_pair_gives_the_documents_written(tmp_path_factory, texts, dtype):
    path = tmp_path_factory.mktemp("pair") / "a.bin"
    file = read_megatron(write_pair(path, texts, dtype).with_suffix(".idx"))
    assert documents(file) == [text.tolist() for text in texts]


def test_documents_of_several_sequences_are_read_as_megatron_means_them(tmp_path):
    """By the format's own words: three sequences, the first two of one document."""
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    lengths, pointers, bounds = [2, 1, 3], [0, 8, 12], [0, 2, 3]
    (tmp_path / "a.idx").write_bytes(
        header
        + struct.pack("<3i", *lengths)
        + struct.pack("<3q", *pointers)
        + struct.pack("<3q", *bounds)
    )
    assert documents(read_megatron(tmp_path / "a.bin")) == [[0, 1, 2], [3, 4, 5]]


def header_of(magic, version, num_tokens):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, num_tokens
    return head.tobytes()


FLAT = [
    (b"", "<u2", [[1, 2, 9], [3, 9], [4]]),
    (header_of(20240520, 1, 6), "<u2", [[1, 2], [9, 3], [9, 4]]),
    (header_of(20240801, 7, 6), "<u4", [[1, 2], [9, 3], [9, 4]]),
]


@pytest.mark.parametrize("header, dtype, wanted", FLAT)
def test_a_flat_file_is_one_document_or_cut_at_its_ends(
    header, dtype, wanted, tmp_path
):
    tokens = [1, 2, 9, 3, 9, 4]
    path = tmp_path / "train.bin"
    path.write_bytes(header + np.array(tokens, dtype).tobytes())
    assert documents(read_nanogpt(path)) == [tokens]
    assert documents(read_nanogpt(path, eos=9)) == wanted


@pytest.mark.parametrize("vocab", [50_257, 128_256])
@pytest.mark.parametrize("dtype", ["<i4", "<u4"])
def test_flat_tokens_of_four_bytes_are_refused_without_a_header(
    vocab, dtype, tmp_path, refuses
):
    tokens = np.random.default_rng(0).integers(0, vocab, 4096).astype(dtype)
    tokens.tofile(path := tmp_path / "tokens.bin")
    with refuses("data.tokens_of_four_bytes", str(path), 4, vocab >> 16):
        read_nanogpt(path)
    tokens.astype("<u2").tofile(path)
    assert read_nanogpt(path).num_tokens == 4096


def test_few_tokens_and_tokens_of_a_small_vocabulary_are_taken(tmp_path):
    for tokens in ([5, 0] * 3, [9, 12] * 100):
        np.array(tokens, "<u2").tofile(path := tmp_path / "tokens.bin")
        assert read_nanogpt(path).num_tokens == len(tokens)


def test_a_flat_file_of_another_format_is_refused(tmp_path, refuses):
    path, tokens = tmp_path / "tokens.bin", np.arange(600, dtype=np.uint16)
    with open(path, "wb") as file:
        np.save(file, tokens)
    with refuses("data.other_format", str(path), ".npy"):
        read_nanogpt(path)
    path.write_bytes(gzip.compress(tokens.tobytes()) + b"\0")
    with refuses("data.other_format", str(path), "gzip"):
        read_nanogpt(path)


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
def test_every_kind_of_text_column_is_read(kind, tmp_path):
    kinds = {
        "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
        "string_view": pyarrow.string_view(),
        "large_string": pyarrow.large_string(),
    }
    texts = ["one", "two", "one"]
    column = pyarrow.array(texts).cast(kinds[kind])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    assert list(parquet_documents(path, "text", Skipped(policy="stop"))) == texts


def test_a_byte_order_mark_is_no_token(tmp_path):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("text\u2028and more\x0c.", encoding="utf-8")
    marked.write_text("text\u2028and more\x0c.", encoding="utf-8-sig")
    assert read_text(marked) == read_text(plain)
    lines = tmp_path / "marked.jsonl"
    lines.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8-sig")
    found = jsonl_documents(lines, "text", Skipped(policy="stop"))
    assert list(found) == ["a\u2028b", "c"]


def test_a_file_replaced_by_one_of_equal_size_and_time_is_tokenized_anew(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one")
    before, times = cached(tmp_path, path), path.stat()
    assert documents(before) == [[*b"one", 0]]
    other = tmp_path / "other.txt"
    other.write_text("two")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert documents(cached(tmp_path, path)) == [[*b"two", 0]]


def test_texts_are_tokenized_once_and_anew_once_they_change(tmp_path):
    path = write_texts(tmp_path, "jsonl", TEXTS)
    first, again = cached(tmp_path, path), cached(tmp_path, path)
    assert first.path == again.path
    path.write_text(json.dumps({"text": "other"}) + "\n")
    other = cached(tmp_path, path)
    assert other.path != first.path and documents(other) == [[*b"other", 0]]


def test_files_one_after_another_are_one_stream_of_documents(tmp_path):
    files = [
        read_megatron(write_pair(tmp_path / f"{name}.bin", texts))
        for name, texts in (("a", [[1, 2], [3]]), ("b", [[4, 5, 6]]))
    ]
    stream = TokenStream.from_files(files, vocab=7)
    assert stream.bounds.tolist() == [0, 2, 3, 6]
    for start in range(6):
        for stop in range(start, 7):
            assert stream.read(start, stop).tolist() == [*range(1, 7)][start:stop]


def test_what_is_held_out_is_the_end_in_whole_documents_where_they_are_short(tmp_path):
    file = read_megatron(write_pair(tmp_path / "a.bin", [[1] * 18, [2] * 2, [3] * 2]))
    stream = TokenStream.from_files([file], vocab=9)
    train, held_out = stream.split(2)
    assert (train.num_tokens, held_out.num_tokens) == (20, 2)
    train, held_out = stream.split(9)  # No document ends near there.
    assert (train.num_tokens, held_out.num_tokens) == (13, 9)
    assert held_out.bounds.tolist() == [13, 18, 20, 22]


# What is wrong with a file is one line with its name, the place and a way out.


LINES = [
    (b'{"text": "tw', ("data.not_json", "--on-bad-line")),
    (b'{"body": "x"}', ("data.missing_field", "'text'", "'body'")),
    (b"[1]", ("data.not_json_object", "list")),
    (b'{"text": null}', ("data.field_not_text", "'text'", "null")),
    (b'{"text": 4}', ("data.field_not_text", "'text'", "number")),
    (b'{"text": "a\\ud83d!"}', ("data.unpaired_surrogate", "'text'", 1, r"\ud83d")),
    (b'{"text": "caf\xe9"}', ("data.not_utf8", 13, "0xe9")),
]


@pytest.mark.parametrize("line, refusal", LINES)
def test_a_broken_line_is_told_or_skipped_and_counted(line, refusal, tmp_path, refuses):
    words = refusal[0] != "data.not_json"  # Those are Python's.
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    with refuses(*refusal, "a.jsonl", 2, kind=DataError, words=words):
        cached(tmp_path, path)
    assert not [*(tmp_path / "tokens").iterdir()]
    told = []
    file = cached(tmp_path, path, on_bad_line="skip", told=told.append)
    assert documents(file) == [[*b"one", 0], [*b"two", 0]]
    assert told[0].startswith("skipped 1 lines, the first: '") and "line 2" in told[0]


def test_a_compressed_file_cut_off_and_one_without_a_document_are_told(
    tmp_path, refuses
):
    path = write_texts(tmp_path, "jsonl.gz", TEXTS)
    path.write_bytes(path.read_bytes()[:-9])
    gzips = dict(kind=DataError, words=False)
    with refuses("data.unreadable_file", "a.jsonl.gz", **gzips):
        cached(tmp_path, path)
    (tmp_path / "b.jsonl").write_text("\n")
    with refuses("data.no_documents", "b.jsonl", kind=DataError):
        cached(tmp_path, tmp_path / "b.jsonl")


def test_a_parquet_file_that_is_none_or_has_no_such_text_is_told(tmp_path, refuses):
    path = write_texts(tmp_path, "parquet", ["one", None])
    with refuses("data.null_text", "a.parquet", 2, "'text'", kind=DataError):
        cached(tmp_path, path)
    with refuses("data.missing_column", "'body'", "'text'", kind=DataError):
        cached(tmp_path, path, field="body")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), path)
    with refuses("data.column_not_text", "'text'", "int64", kind=DataError):
        cached(tmp_path, path)
    path.write_bytes(b"PAR1")
    with refuses("data.unreadable_parquet", "a.parquet", kind=DataError, words=False):
        cached(tmp_path, path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch, refuses):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    install = "pyarrow", "'meshpar[parquet]'"
    with refuses("data.missing_package", *install, kind=DataError):
        cached(tmp_path, tmp_path / "a.parquet")


INDEX = [
    (lambda index: index[:20], ("data.not_megatron_index",)),
    (lambda index: b"x" + index[1:], ("data.not_megatron_index",)),
    (lambda index: index[:-1], ("data.cut_off_index", 81, 2, 82)),
    (lambda index: index[:9] + b"\2" + index[10:], ("data.unknown_version", 2, 1)),
    (
        lambda index: index[:17] + b"\7" + index[18:],
        ("data.unknown_token_type", 7, "float32"),
    ),
    (
        lambda index: index[:42] + b"\1" + index[43:],
        ("data.sequences_not_adjacent", 0, 1),
    ),
    (
        lambda index: index[:-8] + b"\3" + index[-7:],
        ("data.documents_out_of_order", 0, 2),
    ),
]


@pytest.mark.parametrize("spoil, refusal", INDEX)
def test_an_index_of_megatron_that_is_broken_is_told(spoil, refusal, tmp_path, refuses):
    path = write_pair(tmp_path / "a.bin", [[1, 2], [3]])
    index = path.with_suffix(".idx")
    index.write_bytes(spoil(index.read_bytes()))
    with refuses(*refusal, "a.idx", kind=DataError):
        read_megatron(path)


def test_a_file_of_tokens_that_is_cut_off_or_missing_is_told(tmp_path, refuses):
    path = write_pair(tmp_path / "a.bin", [[1, 2], [3]])
    path.write_bytes(path.read_bytes()[:-2])
    with refuses("data.cut_off_tokens", "a.bin", 4, 3, 6, kind=DataError):
        read_megatron(path)
    path.unlink()
    with refuses("data.unreadable_file", "a.bin", kind=DataError):
        read_megatron(path)
    flat = tmp_path / "flat.bin"
    flat.write_bytes(b"abc")
    with refuses("data.partial_token", 3, "uint16", kind=DataError):
        read_nanogpt(flat)
    flat.write_bytes(header_of(20240520, 1, 9) + b"ab")
    with refuses("data.cut_off_tokens", 9, 1042, kind=DataError):
        read_nanogpt(flat)
    flat.write_bytes(b"")
    with refuses("data.no_tokens", "flat.bin", kind=DataError):
        read_nanogpt(flat)


def test_a_file_that_vanishes_or_changes_while_it_is_read_is_told(tmp_path, refuses):
    stream = TokenStream.from_files(
        [read_megatron(write_pair(tmp_path / "a.bin", [[1, 2], [3]]))], vocab=4
    )
    assert stream.read(1, 3).tolist() == [2, 3]
    (tmp_path / "a.bin").write_bytes(b"ab")
    with refuses("data.changed_file", "a.bin", 2, 6, kind=DataError):
        stream.read(0, 1)
    (tmp_path / "a.bin").unlink()
    with refuses("data.lost_file", "a.bin", kind=DataError):
        stream.read(0, 1)


def test_a_document_beyond_the_format_is_told_with_its_file(
    tmp_path, monkeypatch, refuses
):
    monkeypatch.setattr(megatron, "_MOST_TOKENS", 5)
    path = write_texts(tmp_path, "jsonl", ["abc", "to be or not"])
    with refuses("data.document_too_long", 1, "a.jsonl", 13, 5, kind=DataError):
        cached(tmp_path, path)
    assert not list(tmp_path.rglob("*unfinished"))


def test_what_cannot_be_finished_leaves_nothing(tmp_path):
    with (
        pytest.raises(FileNotFoundError),
        MegatronWriter(tmp_path / "a.bin", "<u2") as w,
    ):
        w.add(np.arange(3))
        w._unfinished.unlink()
    assert not list(tmp_path.iterdir())


def test_a_header_of_a_negative_number_of_tokens_is_told(tmp_path, refuses):
    (tmp_path / "a.bin").write_bytes(header_of(20240520, 1, -5))
    with refuses("data.negative_token_count", -5, kind=DataError):
        read_nanogpt(tmp_path / "a.bin")


@pytest.mark.parametrize("dtype, wrong", [("<u2", 300), ("<i4", -1)])
def test_a_token_outside_the_vocabulary_is_told_with_its_place(
    dtype, wrong, tmp_path, refuses
):
    file = read_megatron(write_pair(tmp_path / "a.bin", [[1, 2], [3, wrong]], dtype))
    stream = TokenStream.from_files([file], vocab=256)
    place = "a.bin", 3, wrong, 256
    for read in (stream.check_vocab, lambda: stream.read(2, 4)):
        with refuses("data.token_outside_vocabulary", *place, kind=DataError):
            read()


def test_a_tokenizer_that_is_none_or_ends_no_document_is_told(tmp_path, refuses):
    with refuses("data.unreadable_tokenizer", "absent.json", kind=DataError):
        FileTokenizer(tmp_path / "absent.json")
    (tmp_path / "a.json").write_text("{}")
    with refuses("data.not_tokenizer", "a.json", kind=DataError, words=False):
        FileTokenizer(tmp_path / "a.json")
    path = write_bpe(tmp_path / "b.json", TEXTS, eos="<stop>")
    with refuses("data.no_end_token", "<|endoftext|>", "--eos", kind=DataError):
        FileTokenizer(path)
    with refuses("data.unknown_end_token", "'<halt>'", "--eos", kind=DataError):
        FileTokenizer(path, eos="<halt>")
    stop = FileTokenizer(path, eos="<stop>").eos
    assert FileTokenizer(path, eos="7").eos == 7  # Not the digit's token.
    with refuses("data.unknown_end_token", 999, "--eos", kind=DataError):
        FileTokenizer(path, eos="999")
    Tokenizer(models.BPE()).save(str(tmp_path / "c.json"))
    for eos in (None, "5", "x"):
        with refuses("data.empty_tokenizer", "c.json", 0, kind=DataError):
            FileTokenizer(tmp_path / "c.json", eos=eos)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert FileTokenizer(path).eos == stop


# Where data are.


def test_a_folder_a_pattern_and_a_file_are_found_in_order(tmp_path):
    for name in ("b.txt", "a.jsonl", "notes.md", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    write_pair(tmp_path / "c.bin", [[1]])
    (tmp_path / "d.bin").write_bytes(b"ab")
    found = [
        (path.name, format) for path, format in DataSource(path=str(tmp_path)).files()
    ]
    wanted = [("a.jsonl", "jsonl"), ("b.txt", "text")]
    assert found == [*wanted, ("c.bin", "megatron"), ("d.bin", "nanogpt")]
    ((path, _),) = DataSource(path=str(tmp_path / "*.txt")).files()
    assert path.name == "b.txt"
    assert DataSource(path=str(tmp_path / "notes.md"), format="text").files()


def test_a_folder_leaves_out_the_run_that_lies_in_it(tmp_path):
    inside = tmp_path / "run" / "tokens"
    inside.mkdir(parents=True)
    for path in (tmp_path / "a.txt", tmp_path / "tok.json", inside / "b.txt"):
        path.write_text("x")
    others = [tmp_path / "run", tmp_path / "tok.json"]
    found = DataSource(path=str(tmp_path)).files(others)
    assert [path.name for path, _ in found] == ["a.txt"]
    ((path, _),) = DataSource(path=str(inside)).files(others)  # The data themselves.
    assert path.name == "b.txt"


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_stays(tmp_path):
    names = ("a.0.unfinished", "a.0.idx-unfinished", "ab.0.unfinished")
    for name in names:
        (tmp_path / name).write_bytes(b"left")
    with MegatronWriter(tmp_path / "a.bin", np.dtype("<u2")) as first:
        first.add(np.array([1]))
        with MegatronWriter(tmp_path / "a.bin", np.dtype("<u2")) as second:
            second.add(np.array([2]))
    assert read_megatron(tmp_path / "a.bin").read(0, 1).tolist() == [1]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.bin", "a.idx", "ab.0.unfinished"]


PLACES = [
    ("absent.txt", ("data.missing_file",)),
    ("absent/*.txt", ("data.no_match",)),
    ("empty", ("data.empty_folder", ".txt", ".jsonl")),
    ("notes.md", ("data.unknown_suffix", "format=text")),
]


@pytest.mark.parametrize("name, refusal", PLACES)
def test_a_place_without_data_is_told(name, refusal, tmp_path, refuses):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("x")
    with refuses(*refusal, name, kind=DataError):
        DataSource.parse(str(tmp_path / name)).files()


WRITTEN = [
    ("path=a.txt,weight=0", ("data.weight_not_positive", "weight=0", "a.txt")),
    ("path=a.txt,weight=-0.5", ("data.weight_not_positive", "weight=-1/2", "a.txt")),
    ("path=a.txt,weight=much", ("data.weight_not_number", "weight=much")),
    ("path=a.txt,weihgt=1", ("data.unknown_key", "'weihgt'", "'weight'")),
    ("weight=1,field=a", ("data.missing_path", "'weight=1,field=a'")),
    (
        "path=a.txt,format=csv",
        ("data.unknown_format", "format=csv", "a.txt", "jsonl", "megatron"),
    ),
]


@pytest.mark.parametrize("text, refusal", WRITTEN)
def test_a_source_that_is_written_wrong_is_told(text, refusal, refuses):
    with refuses(*refusal, kind=DataError):
        DataSource.parse(text)


@pytest.mark.parametrize(
    "text", ["a.txt", "path=a.txt,weight=0.7", "path=b,weight=1/3,field=x,format=jsonl"]
)
def test_a_source_is_printed_as_it_is_parsed(text):
    assert str(DataSource.parse(text)) == text


def test_weights_of_some_sources_only_are_refused(refuses):
    sources = [DataSource.parse("path=a.txt,weight=1"), DataSource.parse("b.txt")]
    with refuses("data.missing_weight", "b.txt", kind=DataError):
        check_weights(sources)
