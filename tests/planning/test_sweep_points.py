"""Points of a sweep: what is typed becomes settings, a name and a configuration, or is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.load import dump_resolved, read_config
from pipeline.engine.lifecycle import _trainings
from pipeline.errors import ConfigError
from pipeline.planning.points import (
    MOST,
    Point,
    named_point,
    named_points,
    points_in,
    typed_points,
    value_as_written,
)

BASE = ("data.path=/data", "train.task=some.task:Task", "train.options={width: 8}")


def points(*words: str, file: Path | None = None, base: tuple[str, ...] = BASE) -> tuple[Point, ...]:
    """Return the points that words of a command line ask for."""
    return points_in(read_config(None, [*base, f"train.sweep.points={typed_points(words, file)}"]).config)


def names(*words: str, file: Path | None = None) -> list[str]:
    return [point.name for point in points(*words, file=file)]


def test_a_grid_has_a_point_for_each_combination_and_its_name_says_what_differs() -> None:
    found = points("train.seed=0:2", "train.learning_rate=1e-4,3e-4")
    assert [point.name for point in found] == [
        "seed=0 learning_rate=1e-4",
        "seed=0 learning_rate=3e-4",
        "seed=1 learning_rate=1e-4",
        "seed=1 learning_rate=3e-4",
    ]
    assert [(point.config.train.seed, point.config.train.learning_rate) for point in found] == [
        (0, 1e-4), (0, 3e-4), (1, 1e-4), (1, 3e-4),
    ]  # fmt: skip


def test_a_point_has_the_configuration_of_its_plain_twin() -> None:
    (point,) = points("train.options.width=16")
    assert point.config == read_config(None, [*BASE, "train.options.width=16"]).config


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.seed=3:6", ["seed=3", "seed=4", "seed=5"]),
        ("train.seed=0:10:4", ["seed=0", "seed=4", "seed=8"]),
        ("train.frozen=[],[a,b]", ["frozen=", "frozen=a,b"]),
        ("train.clip=null,0.5", ["clip=null", "clip=0.5"]),
        ("train.schedule.warmup=1, 2", ["warmup=1", "warmup=2"]),
    ],
)
def test_values_are_ranges_or_lists(word: str, expected: list[str]) -> None:
    assert names(word) == expected


def test_names_are_as_long_as_they_must_be_to_tell_keys_apart() -> None:
    (name,) = names("train.schedule.warmup=1", "train.options.warmup=2")
    assert name == "schedule.warmup=1 options.warmup=2"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("points.csv", "train.seed,train.learning_rate\n1,1e-3\n2,\n"),
        ("points.csv", "﻿train.seed, train.learning_rate\r\n1, 1e-3\r\n2,\r\n"),
        ("points.yaml", "- {train.seed: 1, train.learning_rate: 1e-3}\n- {train.seed: 2}\n"),
        ("points.json", json.dumps([{"train.seed": 1, "train.learning_rate": 1e-3}, {"train.seed": 2}])),
    ],
)
def test_a_file_has_a_point_in_each_row(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8", newline="")
    first, second = points(file=tmp_path / file)
    assert first.settings == {"train.seed": 1, "train.learning_rate": 1e-3}
    assert (second.config.train.seed, second.config.train.learning_rate) == (2, 1e-4)


def test_a_file_and_a_grid_multiply(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("train.learning_rate\n1e-4\n3e-4\n")
    assert len(names("train.seed=0:3", file=path)) == 6


def test_encoders_can_be_swept() -> None:
    found = points("train.embeddings=[main],[small]", base=(*BASE, "embed.also={small: {}}"))
    assert [point.config.encoders_read for point in found] == [("main",), ("small",)]


def test_paths_start_from_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "points.csv").write_text("train.pretrained\na.pt\n")
    (of_file,) = points(file=tmp_path / "there" / "points.csv")
    (typed,) = points("train.pretrained=a.pt")
    assert of_file.config.train.pretrained == tmp_path / "there" / "a.pt"
    assert typed.config.train.pretrained == tmp_path / "a.pt"


def test_points_whose_short_names_are_the_same_have_longer_ones() -> None:
    found = names("train.pretrained=/a/w.pt,/b/w.pt,/b/v.pt")
    assert found == ['pretrained="/a/w.pt"', 'pretrained="/b/w.pt"', "pretrained=v.pt"]


def test_a_plain_training_is_the_same_work_as_the_point_that_it_is() -> None:
    swept = f"train.sweep.points={typed_points(['train.options.width=16,32'], None)}"
    sets = ([*BASE, swept], [*BASE, "train.options.width=16"], BASE)
    of_sweep, of_point, of_another = (
        _trainings(json.loads(dump_resolved(read_config(None, [*s]).config))) for s in sets
    )
    assert of_point[0] in of_sweep
    assert of_another[0] not in of_sweep


def test_wrong_words_are_refused_with_what_helps() -> None:
    for words in (
        "train.sed=0:2",
        "train.seed",
        "=1",
        "train.seed=",
        "train.seed=1,,2",
        "train.seed=5:5",
        "train.seed=1,1",
        "train.seed=1,01",
        "train.seed=0:2 train.seed=4",
        "train.seed=0:2000",
        "train.seed=0:1000000000000",
        "train.seed=0:100 train.learning_rate=" + ",".join(f"{n}e-4" for n in range(1, 20)),
        "train.learning_rate=-1",
        "train.effective_batch=4 train.epochs=nine",
        "cluster.train.cpus=1,2",  # which makes no other model
        "train.log_every=1,2",
        "train.sweep.grace=1,2",
        "graph.neighbours=8,16",  # which changes what is trained on
        "data.limit=8,16",
        "train.epochs=1,2",  # which are one training
        "train.task=a.b:C",
        "train.options.head.width=4",
        "train.options.width.of=4",
    ):
        with pytest.raises(ConfigError) as refused:
            points(*words.split())
        assert refused.value.remedy, words
    with pytest.raises(ConfigError):
        points("train.seed=0:2", base=("data.path=/data", "train.command=python train.py"))  # no script is swept


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    for file, text in (
        ("a.csv", b""),
        ("a.csv", b"train.seed\n"),
        ("a.csv", b"train.seed\n1,2\n"),
        ("a.csv", b'train.seed\n"1\n'),
        ("a.csv", b"\xff\xfe"),
        ("a.yaml", b"train.seed: 1\n"),
        ("a.yaml", b"- [1]\n"),
        ("a.yaml", b"- {train.seed: 1\n"),
        ("a.yaml", b"- {train.seed: 1}\n- {train.seed: 1}\n"),
        ("a.yaml", b"- !!python/object/apply:os.system [true]\n"),
    ):
        (tmp_path / file).write_bytes(text)
        with pytest.raises(ConfigError):
            points(file=tmp_path / file)
    with pytest.raises(ConfigError):
        points(file=tmp_path / "none.csv")
    (tmp_path / "a.csv").write_text("train.seed\n1\n")
    with pytest.raises(ConfigError):
        points("train.seed=0:2", file=tmp_path / "a.csv")  # a key in both


def test_the_most_points_of_a_run_are_allowed() -> None:
    assert len(names(f"train.seed=0:{MOST}")) == MOST


def test_points_are_named_by_as_much_as_tells_them_apart() -> None:
    known = ["seed=0 learning_rate=1e-4", "seed=0 learning_rate=3e-4", "seed=1 learning_rate=1e-4"]
    assert named_point("seed=1", known) == 2
    assert named_point("learning_rate=3e-4 seed=0", known) == 1
    for wrong in ("seed=0", "seed=7", "seed=*", ""):
        with pytest.raises(ConfigError, match="seed=0 learning_rate=1e-4"):
            named_point(wrong, known)


def test_several_points_are_named_by_what_they_share_and_the_nearest_come_first_where_there_is_none() -> None:
    known = [f"seed={seed} learning_rate={rate}" for seed in range(12) for rate in ("1e-4", "3e-4")]
    assert named_points("learning_rate=3e-4", known) == [*range(1, 24, 2)]
    assert named_points("seed=1* learning_rate=1*", known) == [2, 20, 22]
    assert named_points("seed=1", known) == [2, 3]  # and not those of 10 and 11
    assert named_points(known[5], known) == [5]
    with pytest.raises(ConfigError, match=r"there are: seed=11 "):
        named_points("seed=11 learning_rate=2e-4", known)


@given(st.floats(min_value=1e-300, max_value=1e300, allow_nan=False))
def test_a_number_is_shown_as_itself(value: float) -> None:
    assert float(value_as_written(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-4, "1e-4"), (3e-05, "3e-5"), (0.25, "0.25"), (1.0, "1"), (2.5e-4, "2.5e-4"), (True, "true"), (None, "null")],
)
def test_numbers_are_shown_as_people_write_them(value: object, text: str) -> None:
    assert value_as_written(value) == text
