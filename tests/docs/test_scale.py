"""docs/scale.md says what was measured, and the script that measures it runs every stage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.runs import scale
from benchmarks.scale_parts import page
from benchmarks.scale_parts.metadata import metadata_side
from benchmarks.scale_parts.scheduler_side import scheduler_side
from pipeline.runs.dataset import worklist
from pipeline.runs.workflow import embed_stage
from pipeline.store import store

ROOT = Path(__file__).resolve().parents[2]


def test_every_table_of_the_page_is_what_the_results_say() -> None:
    text = page.PAGE.read_text()
    assert {block[2] for block in page.BLOCK.finditer(text)} == {*page.TABLES}
    assert text == page.filled(text, json.loads(page.RESULTS.read_text())), "python -m benchmarks.scale_parts.page"


def test_the_page_names_limits_as_the_code_has_them() -> None:
    text = " ".join(page.PAGE.read_text().split())
    assert f"more than {store._UNINDEXED_RECORDS:,} records" in text
    assert f"({page.MAX_ARRAY_SIZE:,} unless" in text
    assert f"no more than {worklist.MOST_PER_TASK:,} items" in text
    assert f"and {embed_stage.MOST_PER_PROCESS:,} sequences" in text
    assert f"keeps {store._OPEN_SHARDS} shards of a kind open" in text
    assert (page.STAT_S, store._UNINDEXED_SHARE) == ((1e-4, 1e-3), 0.05), "0.1 ms, 1 ms; a twentieth"


def test_growth_sets_the_largest_size_beside_the_smallest_and_what_missed_is_bold() -> None:
    sizes = {
        size: {"largest_mb": mb, "cpu_ms_per_item": cpu, "wall_ms_per_item": 1.0, "machine": "a", "date": f"day {size}"}
        for size, mb, cpu in ((1000, 100.0, 2.0), (100, 90.0, 8.0), (10, 80.0, 4.0))
    }
    grown = scale.growth(sizes)
    ratios = {"from": 10, "to": 1000, "memory": 1.25, "cpu_per_item": 0.5, "wall_per_item": 1.0}
    assert grown == {**ratios, "machine": "a", "date": "day 10"}, "the older of the two"
    told = page.growth({"reach": scale.REACH, "growth": {"scan": grown}})
    assert "| scan | 10, 1,000 | **1.25×** | 0.50× | 1.00× |" in told


def test_figures_of_other_sizes_stay_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    for size, stage in (("100", "scan"), ("20", "scan"), ("20", "embed")):
        scale.Results(out).put("sizes", size, stage, {"of": size})
    sizes = json.loads(out.read_text())["sizes"]
    assert {size: list(stages) for size, stages in sizes.items()} == {"20": ["scan", "embed"], "100": ["scan"]}
    assert list(sizes) == ["20", "100"]
    assert {*sizes["20"]["embed"]} == {"of", "machine", "date"}


@pytest.mark.nightly
def test_a_plan_of_many_items_is_measured_without_any_work(tmp_path: Path) -> None:
    found = scheduler_side(tmp_path, 1100)
    assert (found["items"], found["tasks"], found["items_of_largest_task"]) == (1100, 3, 512)
    assert found["planned"]["peak_mb"] > found["planned"]["base_mb"] > 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.nightly  # the stages' processes, twice: 60 CPU seconds
@pytest.mark.timeout(900)
def test_every_stage_is_measured_at_every_size(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    words = ["--sizes", "20,40", "--million", "3000", "--dir", str(tmp_path), "--out", str(out)]
    subprocess.run([sys.executable, str(ROOT / "benchmarks/runs/scale.py"), *words], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert {size: list(stages) for size, stages in found["sizes"].items()} == {
        "20": [*scale.STAGES], "40": [*scale.STAGES],
    }  # fmt: skip
    for size, stages in found["sizes"].items():
        assert stages["scan"]["records"] == stages["embed"]["records"] == 2 * int(size)
        assert all(one["peak_mb"]["supervisor"] > 10 < one["peak_mb"]["worker"] for one in stages.values())
        assert stages["train"]["first_step_s"] > stages["train"]["worker_first_step_s"] > 0
    assert {*found["growth"]} == {*scale.STAGES}
    assert found["index"]["3000"]["index_bytes_per_record"] < 100
    assert not list(tmp_path.glob("scale-*")), "projects are removed"
    for table in (page.measured, page.growth, page.training, page.million):
        assert table(found)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.nightly  # strace makes everything slow
@pytest.mark.timeout(900)
def test_the_calls_of_an_item_are_those_on_its_file(tmp_path: Path) -> None:
    found = metadata_side(tmp_path, 8, 40)["calls_per_item"]
    assert found["scan"]["inputs"]["openat"] == found["graph"]["inputs"]["openat"] == 1.0
    assert "openat" not in found["embed"]["inputs"]
