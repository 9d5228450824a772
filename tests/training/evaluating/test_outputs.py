"""What a model says of each item comes together from all ranks, once and whole, in little memory."""

from __future__ import annotations

import csv
import json
import math
import shutil
import tracemalloc

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.files import cell_text
from pipeline.training.checkpoints.sealed_folder import FolderDamaged
from pipeline.training.evaluating.outputs import GatheredOutputs, OutputWriter, done_numbers, write_tables
from tests.training.checkpoints.saved import kill_at_each_step, on_full_disk, spoil


def name_of(number):
    return f"item {number}"


def outputs_of(numbers):
    """A number, a map whose size differs, and something that only every third item has."""
    return {
        "score": torch.tensor([number / 7 for number in numbers], dtype=torch.float32),
        "map": [torch.full((number % 4, 3), number, dtype=torch.float64) for number in numbers],
        "some": [number if number % 3 == 0 else None for number in numbers],
    }


def write(folder, rank, numbers, size=3, **options):
    with OutputWriter(folder, rank, **options) as writer:
        for first in range(0, len(numbers), size):
            part = numbers[first : first + size]
            writer.add([name_of(number) for number in part], part, outputs_of(part))


def check(gathered, numbers):
    numbers = sorted(numbers)
    assert gathered.numbers.tolist() == numbers
    assert [gathered.id(place) for place in range(len(numbers))] == [name_of(number) for number in numbers]
    assert list(gathered) == ["map", "score", "some"]
    score, maps, some = gathered["score"], gathered["map"], gathered["some"]
    assert (len(score), len(maps)) == (len(numbers), len(numbers))
    for place, number in enumerate(numbers):
        assert score[place].shape == ()
        assert score[place] == np.float32(number / 7)
        assert score[place].dtype == np.float32
        np.testing.assert_array_equal(maps[place], np.full((number % 4, 3), number, np.float64))
    thirds = [number for number in numbers if number % 3 == 0]
    assert some.numbers.tolist() == thirds
    assert [int(value) for value in some] == thirds
    assert [some.id(place) for place in range(len(some))] == [name_of(number) for number in thirds]


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 10_000), min_size=3, max_size=40, unique=True),
    ranks=st.integers(1, 4),
    part_bytes=st.sampled_from([1, 1000, 1 << 20]),
)
def test_whatever_the_ranks_and_parts_items_come_in_the_order_of_their_numbers(
    tmp_path_factory, numbers, ranks, part_bytes
):
    folder = tmp_path_factory.mktemp("outputs")
    numbers = [3, *(number for number in numbers if number != 3)]
    for rank in range(ranks):
        write(folder, rank, numbers[rank::ranks], part_bytes=part_bytes)
    check(GatheredOutputs(folder), numbers)


def test_memory_goes_by_a_part_and_not_by_the_split(tmp_path):
    values = np.zeros((1000, 100))

    def peak(call):
        tracemalloc.start()
        made = call()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found, made

    def written():
        with OutputWriter(tmp_path, 0, part_bytes=2 << 20) as writer:
            for number in range(100):
                writer.add([f"{number}"], [number], {"map": [values]})

    assert 100 * values.nbytes == 80_000_000
    assert peak(written)[0] < 10 << 20
    used, gathered = peak(lambda: GatheredOutputs(tmp_path))
    assert used < 10 << 20
    used, total = peak(lambda: sum(array.size for array in gathered["map"]))
    assert (used < 3 << 20, total) == (True, 100 * values.size)
    used, files = peak(lambda: write_tables(gathered, tmp_path / "tables", part_bytes=2 << 20))
    assert used < 10 << 20
    assert len(files) > 20


def test_what_was_added_is_a_copy(tmp_path):
    values, rows = torch.ones(2), [np.ones(3), torch.ones(3)]
    with OutputWriter(tmp_path, 0) as writer:
        writer.add(["a", "b"], [0, 1], {"one": values, "row": rows})
        values.zero_()
        rows[0][:] = 0
        rows[1].zero_()
    gathered = GatheredOutputs(tmp_path)
    assert [array.sum() for name in gathered for array in gathered[name]] == [1, 1, 3, 3]


def test_numbers_keep_their_types_but_for_bfloat16(tmp_path):
    outputs = {
        "flag": ([True], "bool", ()), "count": ([3], "int64", ()), "share": ([0.25], "float64", ()),
        "half": (torch.ones(1, dtype=torch.float16), "float16", ()), "list": ([[1, 2, 3]], "int64", (3,)),
        "brain": (torch.ones(1, 2, dtype=torch.bfloat16), "float32", (2,)),
        "word": (torch.ones(1, dtype=torch.uint8), "uint8", ()), "nothing": (torch.zeros(1, 0, 5), "float32", (0, 5)),
    }  # fmt: skip
    with OutputWriter(tmp_path, 0) as writer:
        writer.add(["a"], [0], {name: value for name, (value, *_) in outputs.items()})
    for name, column in GatheredOutputs(tmp_path).items():
        assert (str(column[0].dtype), column[0].shape) == outputs[name][1:], name


def test_a_name_may_have_another_type_in_another_item(tmp_path):
    with OutputWriter(tmp_path, 0) as writer:
        writer.add(["a", "b"], [0, 1], {"x": [1, 2.5]})
        writer.add(["c"], [2], {"x": [np.ones(2, np.float32)]})
    column = GatheredOutputs(tmp_path)["x"]
    assert [array.tolist() for array in column] == [1, 2.5, [1.0, 1.0]]
    assert (column.width, column.number) == (None, float)


def test_what_is_no_output_is_refused_and_leaves_nothing(tmp_path):
    strange = [
        torch.ones(3), torch.tensor(1.0), 1.0, "no", ["a", "b"], torch.ones(2, dtype=torch.complex64),
    ]  # fmt: skip
    for outputs in (*({"x": one} for one in strange), *({name: torch.ones(2)} for name in ("x.y", "id", 3))):
        writer = OutputWriter(tmp_path, 0)
        with pytest.raises(ConfigError) as refused:
            writer.add(["a", "b"], [0, 1], {"good": torch.ones(2), **outputs})
        assert repr(*outputs) in str(refused.value)
        assert "pipeline.protocol" in refused.value.remedy
        writer.flush()
        assert list(tmp_path.iterdir()) == []


def test_what_is_done_is_not_done_again_on_other_ranks(tmp_path):
    items = list(range(40))
    for rank in range(3):
        write(tmp_path, rank, items[:25][rank::3], part_bytes=500)
    for rank in range(2):
        done = set(done_numbers(tmp_path).tolist())
        assert done >= set(items[:25])
        write(tmp_path, rank, [number for number in items[rank::2] if number not in done])
    check(GatheredOutputs(tmp_path), items)


def test_an_item_that_is_there_twice_is_refused(tmp_path):
    write(tmp_path, 0, [1, 2])
    write(tmp_path, 1, [2, 3])
    with pytest.raises(DataError, match=r"part-00001-000000.*item 2 \(item 2\) is in it, and in part-00000-000000"):
        GatheredOutputs(tmp_path)


CHANGES = [bytearray.pop, lambda data: data.append(data.pop() ^ 1), bytearray.clear, lambda data: data.extend(data)]
IS_FLIPPED = 1


@pytest.mark.parametrize("file", ["manifest.json", "values.safetensors"])
def test_a_damaged_part_is_refused_and_its_items_are_done_again(tmp_path, file, caplog):
    for number, change in enumerate(CHANGES):
        folder = tmp_path / str(number)
        write(folder, 0, list(range(9)), size=1, part_bytes=1)
        spoil(folder / "part-00000-000004" / file, change)
        with pytest.raises(FolderDamaged, match="part-00000-000004") as refused:
            GatheredOutputs(folder)
        if number != IS_FLIPPED:  # of a whole length: only reading finds it
            assert done_numbers(folder).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
            assert "part-00000-000004" in caplog.text
        else:
            shutil.rmtree(folder / refused.value.remedy.split()[2])
        write(folder, 1, [4])
        check(GatheredOutputs(folder), range(9))


def test_outputs_of_another_checkpoint_do_not_mix(tmp_path):
    write(tmp_path, 0, [1], of="one")
    with pytest.raises(ConfigError, match=r"outputs belong to one, not to two.*\n.*rm -r"):
        done_numbers(tmp_path, of="two")
    with pytest.raises(ConfigError, match="outputs belong to one, not to two"):
        GatheredOutputs(tmp_path, of="two")
    assert GatheredOutputs(tmp_path, of="one").numbers.tolist() == [1]


@pytest.mark.fault
def test_a_kill_at_any_moment_costs_only_what_was_not_published(tmp_path):
    steps = 39
    kill_at_each_step(lambda number: write(tmp_path / str(number), 0, list(range(6)), part_bytes=700), steps)
    known = set()
    for number in range(1, steps + 1):
        folder = tmp_path / str(number)
        there = done_numbers(folder).tolist()
        known.add(len(there))
        write(folder, 0, [number for number in range(6) if number not in there])
        check(GatheredOutputs(folder), range(6))
    assert len(known) > 2


def test_a_full_disk_is_said_so(tmp_path):
    def work():
        with pytest.raises(JobFailed, match=r"part-00000-000000.*File too large"):
            write(tmp_path, 0, list(range(300)))

    on_full_disk(3000, work)
    assert done_numbers(tmp_path).tolist() == []
    assert list(tmp_path.iterdir()) == []


IDS = [
    "plain",
    "../../etc/passwd",
    "/root",
    "a,b",
    'say "x"',
    "two\nlines",
    "ü.é",
    "map",
    "x.map",
    "=1+1",
    " ",
    "nul\0",
]


def test_tables_have_every_number_and_arrays_whatever_the_ids(tmp_path):
    folder = tmp_path / "in" / "deep"
    with OutputWriter(tmp_path / "parts", 0) as writer:
        for number, id_ in enumerate(IDS):
            values = {"affinity": [np.float32(0.1) * number], "map": [np.full((number, 2), number, np.int32)]}
            writer.add([id_], [number], values | ({"mixed": [number]} if number % 2 else {"mixed": [[number]]}))
    table, jsonl, *files = write_tables(GatheredOutputs(tmp_path / "parts"), folder, part_bytes=300)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [cell_text(row["id"]) for row in rows] == IDS
    assert list(rows[0]) == ["id", "affinity", "mixed", "map.shape", "map.file"]
    assert [row["affinity"] for row in rows][:2] == ["0.0", "0.1"]
    assert [row["map.shape"] for row in rows] == [f"{number}x2" for number in range(len(IDS))]
    assert [row["mixed"] for row in rows] == [str(number) for number in range(len(IDS))]  # one number in any shape
    lines = [json.loads(line) for line in jsonl.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line["id"] for line in lines] == IDS
    name = rows[1]["map.file"]
    assert lines[1] == {"id": IDS[1], "affinity": 0.1, "map.shape": [1, 2], "map.file": name, "mixed": 1}
    assert {row["map.file"] for row in rows} == {path.name for path in files}
    assert len(files) > 1
    for number, (id_, row) in enumerate(zip(IDS, rows, strict=True)):
        np.testing.assert_array_equal(load_file(folder / row["map.file"])[id_], np.full((number, 2), number))
    everywhere = {path.parent for path in tmp_path.rglob("*") if path.is_file()}
    assert everywhere == {tmp_path / "parts/part-00000-000000", folder}


def test_what_is_not_finite_is_null_in_json_and_itself_in_the_table(tmp_path):
    with OutputWriter(tmp_path / "parts", 0) as writer:
        writer.add(["a", "b", "c"], [0, 1, 2], {"x": [math.nan, math.inf, 1.0], "flag": [True, False, True]})
    table, jsonl = write_tables(GatheredOutputs(tmp_path / "parts"), tmp_path)
    assert table.read_text().splitlines() == ["id,flag,x", "a,True,nan", "b,False,inf", "c,True,1.0"]
    assert jsonl.read_text().splitlines()[0] == '{"id": "a", "flag": true, "x": null}'


def test_short_vectors_are_columns_and_one_number_is_a_number_in_whatever_shape(tmp_path):
    with OutputWriter(tmp_path / "parts", 0) as writer:
        ids, outputs = ["one", "two", "three"], {}
        outputs["affinity"] = np.array([[0.5], [0.25], [2.0]], np.float32)  # as a linear layer gives it
        outputs["shift"] = [np.arange(3.0), np.ones(3), np.zeros(0)]  # the last has none
        outputs["wide"] = np.zeros((3, 17))
        outputs["turn"] = np.zeros((3, 2, 2))
        writer.add(ids, range(3), outputs)
    table, jsonl, *files = write_tables(GatheredOutputs(tmp_path / "parts"), tmp_path / "out", parquet=True)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["affinity"] for row in rows] == ["0.5", "0.25", "2.0"]
    assert [rows[0][f"shift.{at}"] for at in range(3)] == ["0.0", "1.0", "2.0"]
    assert [rows[2][f"shift.{at}"] for at in range(3)] == ["", "", ""]
    assert (rows[0]["wide.shape"], rows[0]["turn.shape"]) == ("17", "2x2")
    assert (rows[0]["wide.file"], rows[0]["turn.file"]) == ("wide-00000.safetensors", "turn-00000.safetensors")
    lines = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert [line["shift"] for line in lines] == [[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], None]
    typed = pq.read_table(files[0])
    assert typed.column_names == list(rows[0])
    assert typed["affinity"].to_pylist() == [0.5, 0.25, 2.0]
    assert typed["shift.1"].to_pylist() == [1.0, 1.0, None]
    assert typed["turn.file"].to_pylist() == ["turn-00000.safetensors"] * 3
