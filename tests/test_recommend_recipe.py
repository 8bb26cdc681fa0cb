"""The programs about recommendation run, and show what they say."""

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest

from meshpar.recipes import clicks, recommend
from meshpar.recipes.bench import tables as bench
from meshpar.train.folder_in_use import folder_in_use
from tests.refusals import ending_of, names


def test_auc_is_the_share_of_pairs_in_the_right_order():
    rng = np.random.default_rng(0)
    scores, good = rng.integers(0, 9, 60), rng.integers(0, 2, 60)
    pairs = [
        (one > other) + 0.5 * (one == other)
        for one in scores[good == 1]
        for other in scores[good == 0]
    ]
    assert clicks.auc(scores, good) == pytest.approx(np.mean(pairs))


def test_drawn_clicks_are_as_likely_as_their_truth_says():
    found = clicks.drawn(num_examples=20_000)
    odds = 1 / (1 + np.exp(-found.truth))
    for low in (0.1, 0.4, 0.7):
        among = (odds > low) & (odds < low + 0.2)
        sigma = 0.5 / np.sqrt(among.sum())
        assert abs(found.clicks[among].mean() - odds[among].mean()) < 4 * sigma


FILES = {
    "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "1\t7\t5\t881250949\n2\t7\t2\t881250950\n2\t9\t4\t881250951\n"
    "1\t7\t3\t881250948\n2\t7\t5\t881250949\n",
    "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\t"
    "class:token_seq\n7\tA\t1995\tComedy Drama\n9\tB\tV\tDrama\n",
    "user": "user_id:token\tage:token\tgender:token\toccupation:token\t"
    "zip_code:token\n1\t33\tM\twriter\t1\n2\t45\tF\tother\t2\n",
}
BOTH, DRAMA = [0, 1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]


def rows_of(found):
    """(user, film, genres, click) of each example."""
    arrays = (found.ids["user"][:, 0], found.ids["item"][:, 0], found.ids["genre"])
    each = zip(*(one.tolist() for one in (*arrays, found.clicks)), strict=True)
    return sorted(each)


def test_movielens_is_read_where_it_lies_and_each_users_last_ratings_are_held_out(
    tmp_path, monkeypatch
):
    for ending, text in FILES.items():
        (tmp_path / f"ml-100k.{ending}").write_text(text)
    monkeypatch.setattr(clicks, "_folder", lambda: tmp_path)
    found = clicks.movielens()
    # Nobody has rated film 9 in training: it has no row, but its genres.
    assert found.rows == {"user": 2, "item": 1, "genre": 2, "occupation": 2}
    train, test = clicks.split(found)
    assert rows_of(train) == [
        (0, 0, BOTH, False),
        (1, 0, BOTH, False),
        (1, 0, BOTH, True),
    ]
    assert rows_of(test) == [(0, 0, BOTH, True), (1, -1, DRAMA, True)]
    assert sorted(test.numbers.tolist()) == [
        pytest.approx([0, 0, 5 / 12, 1]),
        pytest.approx([1, 1, 0, 1]),
    ]


def test_popularity_is_of_the_ratings_trained_on():
    ids = {"item": np.asarray([[0], [0], [1], [-1]]), "user": np.zeros((4, 1), int)}
    found = clicks.Clicks(
        ids=ids,
        numbers=np.zeros((4, 4)),
        clicks=np.asarray([True, False, False, True]),
        truth=None,
        rows={"item": 2, "user": 1},
        held_out=np.asarray([False, False, True, True]),
    )
    # One click in two of item 0; nobody has seen the others: the mean, also 1 in 2.
    assert clicks.popularity(*clicks.split(found)).tolist() == [0.5, 0.5]
    found.clicks[1] = True  # all were clicked in training
    assert clicks.popularity(*clicks.split(found)).tolist() == [1, 1]


@pytest.mark.parametrize(
    "words, refusal",
    [
        ("--layout data=-1", ("layout.open_size", "data=-1")),
        (
            "--layout data=8,sync_every=2",
            ("layout.unsupported_input_gradient", "sync_every", 2, "context"),
        ),
        (
            "--global-batch 4096 --layout data=8",
            ("batch.more_than_examples", 4096, 1800),
        ),
        ("--global-batch 3 --layout data=8", ("batch.indivisible", 3, 8)),
        ("--resume --layout data=8", ("run.resume_without_folder", "--out")),
    ],
)
def test_bad_options_are_refused_in_one_line(
    words, refusal, refuses_recipe, monkeypatch
):
    monkeypatch.setitem(recommend.DATA, "drawn", lambda: clicks.drawn(2000))
    refuses_recipe(lambda: recommend.main(words.split()), *refusal)


def of_movielens():
    return recommend.main(["--data", "movielens"])


def test_movielens_without_its_package_is_one_line(refuses_recipe, monkeypatch):
    monkeypatch.setattr(clicks.importlib.util, "find_spec", lambda name: None)
    refuses_recipe(of_movielens, "data.missing_package", "recbole", "--no-deps")


def test_movielens_whose_package_came_without_files_is_one_line(
    tmp_path, refuses_recipe, monkeypatch
):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(clicks.importlib.util, "find_spec", lambda name: spec)
    refuses_recipe(of_movielens, "data.missing_files", 0, 3, "ml-100k.inter")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("recbole") is None,
    reason="recbole, which brings the ratings: pip install recbole --no-deps",
)
def test_movielens_trains_past_popularity_and_the_users_share(tmp_path):
    log = tmp_path / "rows.jsonl"
    words = f"--data movielens --layout data=8 --log-json {log}"
    assert recommend.main(words.split()) == 0
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["popularity_auc"] + 0.03 < last["auc"]
    assert last["popularity_and_user_auc"] < last["auc"]


@pytest.mark.slow
def test_the_recipe_learns_more_than_popularity(tmp_path):
    log = tmp_path / "rows.jsonl"
    words = f"--steps 250 --layout data=4,stage=2,microbatches=2 --log-json {log}"
    assert recommend.main(words.split()) == 0
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["popularity_auc"] + 0.03 < last["auc"] < last["truth_auc"]


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_in_one_go(tmp_path, capsys, monkeypatch):
    """Under another layout and placement; and what it cannot go on with."""
    monkeypatch.setitem(recommend.DATA, "drawn", lambda: clicks.drawn(500, 40, 30))

    def ended(*words):
        log = tmp_path / "rows.jsonl"
        common = ["--global-batch", "16", "--log-json", str(log), *words]
        assert recommend.main(common) == 0, capsys.readouterr().err
        return [json.loads(line) for line in log.read_text().splitlines()][-2:]

    def check_refused(words, key, *values):
        batch = [] if "--global-batch" in words else ["--global-batch", "16"]
        words = ["--layout", "data=8", *batch, *out, *words]
        end = ending_of(lambda: recommend.main(words))
        assert (end.status, end.key) == (2, key), end
        assert all(names(end.line, value) for value in values), end

    out = ["--out", str(tmp_path / "run")]
    whole = ended("--layout", "data=8", "--steps", "4")
    ended("--layout", "data=8", "--steps", "2", *out)
    check_refused([], "run.folder_is_taken", 2, "--resume")
    with folder_in_use(tmp_path / "run"):
        words = ["--layout", "data=8", "--global-batch", "16", *out, "--resume"]
        assert ending_of(lambda: recommend.main(words)).key == "run.folder_in_use"
    other = ["--resume", "--global-batch", "8"]
    check_refused(other, "run.changed_option", "global_batch", 16, 8)
    check_refused(["--resume", "--steps", "2"], "run.too_few_steps", "--steps", 2)
    resumed = ["--resume", "--layout", "data=2,tensor=4", "--placement", "column_wise"]
    last, scores = ended(*resumed, "--steps", "4", *out)
    assert last["step"] == 3
    assert last["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    assert scores["auc"] == pytest.approx(whole[1]["auc"], abs=1e-3)


def test_the_bench_refuses_rows_that_do_not_divide(refuses_recipe):
    refuses_recipe(lambda: bench.main(["--rows", "500"]), None, 500, 8)


@pytest.mark.slow
def test_both_ways_of_the_bench_have_one_loss(capsys):
    assert bench.main(["--rows", "512", "--examples", "64", "--rounds", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split("at most ")[1].split()[0]) < 1e-6
