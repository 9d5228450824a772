"""What is looked at before the first step: memory, disk, clock, the reports of a GPU and a product."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.training.ranks import node_health
from pipeline.training.ranks.node_health import cautions, defects
from pipeline.training.ranks.rank_pace import STEPS, RankPace
from tests.testkit.project import TRAIN, ProjectOf

REPORT = """<?xml version="1.0" ?>
<nvidia_smi_log><gpu id="00000000:19:00.0">
<clocks_event_reasons><clocks_event_reason_hw_slowdown>{slow}</clocks_event_reason_hw_slowdown></clocks_event_reasons>
<ecc_errors><volatile><sram_uncorrectable_parity>{errors}</sram_uncorrectable_parity></volatile></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending></remapped_rows>
</gpu></nvidia_smi_log>
"""
HEALTHY = {"slow": "Not Active", "errors": "0", "pending": "No"}
GIB = 1 << 30
SLOW = """\
import sys
import time

from pipeline.tasks.interface import Interface


class Slow(Interface):
    def loss(self, model, batch):
        time.sleep(0.05 * ("1/2" in sys.argv))
        return super().loss(model, batch)
"""


class Card:
    """A GPU of 80 GiB, half of it free."""

    index, name = 0, "H100"

    def __init__(self, _device: str) -> None: ...

    def free_and_total_bytes(self) -> tuple[int, int]:
        return 40 * GIB, 80 * GIB


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the report that `nvidia-smi` prints of a GPU, whose tensors are on the CPU."""
    program, report = tmp_path / "bin" / "nvidia-smi", tmp_path / "report.xml"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '--query --xml-format --id=GPU-7' ] && cat '{report}'\n")
    program.chmod(0o755)
    report.write_text(REPORT.format(**HEALTHY))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.setattr(node_health, "Card", Card)
    monkeypatch.setattr(node_health, "computing", Card)
    monkeypatch.setattr(node_health, "is_card", lambda _: True)
    return report


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder on a disk that is too small for anything."""
    folder = tmp_path_factory.mktemp("full")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_healthy_node_has_no_defect(tmp_path: Path) -> None:
    assert list(defects("cpu", GIB, 0)) == []
    assert list(cautions("cpu", tmp_path)) == []


def test_memory_that_others_use_is_a_defect(reports: Path) -> None:
    assert len(list(defects("cpu", 1 << 50, 0))) == 1
    assert len(list(defects("cpu", 0, 60 * GIB))) == 1
    assert list(defects("cpu", 0, 30 * GIB)) == []
    assert list(defects("cpu", 0, 100 * GIB)) == []  # the card is another one than planned: smaller batches will do


def test_a_disk_that_takes_nothing_is_a_defect(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(full))
    assert len(list(defects("cpu", 0, 0))) == 1
    monkeypatch.setenv("TMPDIR", str(full / "of-another-machine"))
    assert list(defects("cpu", 0, 0)) == []


@pytest.mark.parametrize("broken", [{"errors": "3"}, {"pending": "Yes"}])
def test_what_the_driver_reports_as_broken_is_a_defect(reports: Path, broken: dict[str, str]) -> None:
    assert list(defects("cpu", 0, 0)) == []
    reports.write_text(REPORT.format(**HEALTHY | broken))
    assert len(list(defects("cpu", 0, 0))) == 1


def test_a_gpu_without_a_report_is_fit(reports: Path, tmp_path: Path) -> None:
    reports.write_text("Failed to initialize NVML")
    assert list(defects("cpu", 0, 0)) == []
    assert list(cautions("cpu", tmp_path)) == []


def test_a_wrong_product_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(left, other)
        product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert len(list(defects("cpu", 0, 0))) == 1


def test_a_slow_gpu_and_a_clock_that_is_apart_are_said(
    reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports.write_text(REPORT.format(**HEALTHY | {"slow": "Active"}))
    now = node_health.time.time()
    monkeypatch.setattr(node_health.time, "time", lambda: now + 300)
    assert len(list(cautions("cpu", tmp_path))) == 2
    assert list(defects("cpu", 0, 0)) == []


def test_the_rank_that_all_wait_for_is_named() -> None:
    pace = RankPace(["n1", "n1", "n2", "n2"])
    looked = [pace.add([1.0, 1.1, 0.9, 1.6]) for _ in range(STEPS)]
    assert looked == [False] * (STEPS - 1) + [True]
    assert "rank 3 on n2" in pace.slowest
    for _ in range(STEPS):
        pace.add([1.0, 1.1, 0.9, 1.2])
    assert pace.slowest == ""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "where"), [("leave", "SLURM_JOB_ID"), ("leave", "PIPELINE_NODES"), ("warn", "PBS_JOBID")]
)
def test_a_job_of_a_scheduler_leaves_an_unfit_node(project_of: ProjectOf, full: Path, way: str, where: str) -> None:
    project = project_of("graph")
    project.sets(**TRAIN, cluster__train__unfit_node=way, cluster__supervisor__tries=1)
    done = project.submits("train", TMPDIR=str(full), **{where: "7"})
    stage = json.loads(project.types("status", "--json").out)["stages"][-1]
    assert (done.code != 0) == (way == "leave")
    assert [one["cause"] for one in stage["failures"]] == (["node"] if way == "leave" else [])
    assert ("unfit_node=warn" in done.said) == (way == "leave")
    assert any(str(full) in warning for warning in stage["warnings"]) == (way == "warn")


@pytest.mark.nightly
def test_the_slow_rank_of_a_training_is_named_while_it_runs(project_of: ProjectOf) -> None:
    project = project_of("graph")
    (project.folder / "slow.py").write_text(SLOW)
    own = {"train__task": "slow:Slow", "train__epochs": STEPS // 2 + 1, "cluster__train__ranks": 2}
    project.sets(**{**TRAIN, **own})
    assert project.submits("train").code == 0
    stage = json.loads(project.types("status", "--json").out)["stages"][-1]
    assert any("rank 1 on" in warning for warning in stage["warnings"])
