"""Clicks to learn from: drawn with a known truth, or MovieLens-100k's ratings."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar import InputError

NUMBERS, MOST_GENRES = 4, 6
HELD_OUT = 0.1
"""Share of the examples that are not trained on."""

_RATED_WELL = 4.0
_MOVIELENS = "dataset_example/ml-100k"
_FILES = ("ml-100k.inter", "ml-100k.item", "ml-100k.user")


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """Examples of one set.

    Args:
        ids: Feature -> (examples, bag), -1 where a bag has fewer.
        numbers: (examples, 4).
        clicks: 0 or 1 of each.
        truth: The odds' logarithm that each was drawn with; None where nobody knows.
        rows: Feature -> how many ids it has.
        held_out: Whether each is not trained on.
    """

    ids: dict[str, np.ndarray]
    numbers: np.ndarray
    clicks: np.ndarray
    truth: np.ndarray | None
    rows: dict[str, int]
    held_out: np.ndarray

    def __len__(self) -> int:
        return len(self.clicks)

    def part(self, at: np.ndarray) -> Clicks:
        """Return those examples."""
        return Clicks(
            ids={name: ids[at] for name, ids in self.ids.items()},
            numbers=self.numbers[at],
            clicks=self.clicks[at],
            truth=None if self.truth is None else self.truth[at],
            rows=self.rows,
            held_out=self.held_out[at],
        )

    def batch(self, at: np.ndarray) -> dict[str, np.ndarray]:
        """Return those examples as a batch for a step with tables."""
        return {
            **{name: ids[at].astype(np.int32) for name, ids in self.ids.items()},
            "numbers": self.numbers[at].astype(np.float32),
            "clicks": self.clicks[at].astype(np.float32),
        }


def drawn(
    num_examples: int = 200_000, users: int = 3000, items: int = 2000, seed: int = 0
) -> Clicks:
    """Zipf-distributed items and users, whose tastes say how likely a click is.

        log odds = 1.5 * <taste of user, kind of item> + item's own + 0.5 * number 0 - 1

    with tastes and kinds of 4 values, and a bag of the item's genres beside. The last
    tenth is held out.
    """
    rng = np.random.default_rng(seed)
    user = _zipf(rng, users, num_examples, 0.6)
    item = _zipf(rng, items, num_examples, 0.9)
    genre_kinds = rng.normal(size=(20, 4))
    genres = rng.integers(0, 20, (items, 3))
    kinds = 0.6 * genre_kinds[genres].mean(axis=1) + 0.4 * rng.normal(size=(items, 4))
    tastes, own = rng.normal(size=(users, 4)), 0.7 * rng.normal(size=items)
    numbers = rng.normal(size=(num_examples, NUMBERS))
    liked = 1.5 * np.einsum("nk,nk->n", tastes[user], kinds[item])
    truth = liked + own[item] + 0.5 * numbers[:, 0] - 1
    return Clicks(
        ids={"user": user[:, None], "item": item[:, None], "genre": genres[item]},
        numbers=numbers,
        clicks=rng.random(num_examples) < 1 / (1 + np.exp(-truth)),
        truth=truth,
        rows={"user": users, "item": items, "genre": 20},
        held_out=np.arange(num_examples) >= int(num_examples * (1 - HELD_OUT)),
    )


def movielens() -> Clicks:
    """MovieLens-100k as `recbole` brings it: is a film rated with 4 stars or more?

    Of each user the last tenth of the ratings is held out, by time. Users and films are
    numbered as the others have them: a film that nobody else has rated is -1, none.

    Reference: Harper and Konstan 2015; the files are read where they lie, and not
    distributed here.

    Raises:
        InputError: `recbole` is not installed, or came without the files.
    """
    folder = _folder()
    ratings, films, people = (_columns(folder / name) for name in _FILES)
    of_item, of_user = (
        {row[0]: row for row in zip(*columns.values(), strict=True)}
        for columns in (films, people)
    )
    user, item = (np.asarray(ratings[name]) for name in ("user_id", "item_id"))
    held_out = last_per_user(user, np.asarray(ratings["timestamp"], float))
    users, items = (_numbered(words[~held_out]) for words in (user, item))
    words = {word for row in of_item.values() for word in row[3].split()}
    genres = {word: at for at, word in enumerate(sorted(words))}
    jobs = _numbered([row[3] for row in of_user.values()])
    of_film = {name: _genres(row[3], genres) for name, row in of_item.items()}
    about = [
        _about(of_user[one], of_item[other])
        for one, other in zip(user, item, strict=True)
    ]
    return Clicks(
        ids={
            "user": _ids(user, users),
            "item": _ids(item, items),
            "genre": np.asarray([of_film[one] for one in item]),
            "occupation": _ids([of_user[one][3] for one in user], jobs),
        },
        numbers=np.asarray(about),
        clicks=np.asarray(ratings["rating"], float) >= _RATED_WELL,
        truth=None,
        rows={
            "user": len(users),
            "item": len(items),
            "genre": len(genres),
            "occupation": len(jobs),
        },
        held_out=held_out,
    )


def last_per_user(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Which examples are among the last tenth of their user's, one or more.

    Example:
        >>> last_per_user(np.asarray([7, 8, 7, 8]), np.asarray([3, 1, 2, 5])).tolist()
        [True, False, False, True]
    """
    _, of, times = np.unique(user, return_inverse=True, return_counts=True)
    order = np.lexsort((time, of))
    place = np.empty(len(user), int)  # among those of the same user
    place[order] = np.arange(len(user)) - np.repeat(np.cumsum(times) - times, times)
    return place >= np.minimum(times - 1, times * (1 - HELD_OUT))[of]


def split(clicks: Clicks) -> tuple[Clicks, Clicks]:
    """Return the training examples and the held-out ones."""
    return clicks.part(~clicks.held_out), clicks.part(clicks.held_out)


def popularity(train: Clicks, test: Clicks) -> np.ndarray:
    """How often each held out example's item was clicked in training.

    Of few examples it is drawn to the mean, as ten more of those would.
    """
    return _shares("item", train, test)


def popularity_and_user(train: Clicks, test: Clicks) -> np.ndarray:
    """Log odds of the item's share of clicks and of the user's own, added."""
    shares = (_shares(name, train, test) for name in ("item", "user"))
    return sum((np.log(one / (1 - one)) for one in shares), np.zeros(len(test)))


def _shares(feature: str, train: Clicks, test: Clicks) -> np.ndarray:
    """The share of clicks in training of each held out example's id."""
    ids, clicks = train.ids[feature][:, 0], train.clicks.astype(float)
    # The place after all rows is for -1, an id that training has not seen.
    size = train.rows[feature] + 1
    times, total = np.bincount(ids, None, size), np.bincount(ids, clicks, size)
    return ((total + 10 * clicks.mean()) / (times + 10))[test.ids[feature][:, 0]]


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """How likely a click scores above none: area under the ROC curve; ties are half.

    Example:
        >>> auc(np.asarray([0.1, 0.4, 0.35, 0.8]), np.asarray([0, 0, 1, 1]))
        0.75
    """
    _, place, times = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(times) - (times - 1) / 2)[place]
    good = np.asarray(clicks, bool)
    many, others = good.sum(), (~good).sum()
    return float((rank[good].sum() - many * (many + 1) / 2) / (many * others))


def _zipf(rng: np.random.Generator, size: int, many: int, power: float) -> np.ndarray:
    """Ids whose number n comes up as often as n ** -power says."""
    share = np.arange(1, size + 1) ** -power
    return rng.choice(size, many, p=share / share.sum())


def _folder() -> Path:
    found = importlib.util.find_spec("recbole")
    if found is None or found.origin is None:
        raise InputError(
            "--data movielens is read from the package recbole, which is not "
            "installed: pip install recbole --no-deps",
            key="data.missing_package",
        )
    folder = Path(found.origin).parent / _MOVIELENS
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"--data movielens: {folder} has {len(_FILES) - len(missing)} of the "
            f"{len(_FILES)} files, not {', '.join(missing)}; take the recbole that "
            "brings them: pip install --force-reinstall --no-deps recbole==1.2.1",
            key="data.missing_files",
        )
    return folder


def _columns(path: Path) -> dict[str, list[str]]:
    """Columns by name of a file of tab-separated values, `name:type` at the top."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    names = [name.partition(":")[0] for name in head.split("\t")]
    columns = zip(*(line.split("\t") for line in lines), strict=True)
    return dict(zip(names, map(list, columns), strict=True))


def _numbered(words: Sequence[str] | np.ndarray) -> dict[str, int]:
    return {word: at for at, word in enumerate(sorted(set(words)))}


def _ids(words: Sequence[str] | np.ndarray, numbers: dict[str, int]) -> np.ndarray:
    """(examples, 1): the number of each, -1 where it has none."""
    return np.asarray([[numbers.get(word, -1)] for word in words])


def _genres(text: str, known: dict[str, int]) -> list[int]:
    found = [known[word] for word in text.split()][:MOST_GENRES]
    return found + [-1] * (MOST_GENRES - len(found))


def _about(user: tuple[str, ...], item: tuple[str, ...]) -> list[float]:
    """Age, gender and year, each around 0; and 1."""
    year = float(item[2]) if item[2].isdigit() else 1990.0
    return [(float(user[1]) - 33) / 12, float(user[2] == "F"), (year - 1990) / 12, 1.0]
