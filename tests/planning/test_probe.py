"""Probes on this machine: what they measure, how they fail, and that the next plan knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.codec import read_plain, write_plain
from pipeline.errors import ConfigError, JobFailed, SubmissionRefused
from pipeline.memory.footprint import Provenance
from pipeline.memory.hardware.gpus import device
from pipeline.memory.history import DIED_GROWTH
from pipeline.memory.outlook import Probed, ProbeOutcome
from pipeline.memory.planning.memory_plan import CardSpec
from pipeline.memory.runtime.meters import RSS_IS_MEANT, BeforeModel
from pipeline.planning.probe import (
    FOLDER,
    ProbeFolder,
    ProbeResult,
    draft_probe,
    errand_of,
    measured_pace,
    measured_ratios,
    model_name,
    peaks_of,
    probe,
    record_death,
    run_probe,
)
from tests.planning.probes import GIB, Prepared, card, prepare


def probed(prepared: Prepared, place: CardSpec, said: list[str] | None = None) -> Probed:
    tell = (said if said is not None else []).append
    with LocalExecutor(Machine(1, (), 8 * GIB)) as executor:
        asked = (prepared.config, prepared.work, prepared.plan, prepared.oracle, [place], executor, tell)
        (found,) = probe(*asked, beside=prepared.folder)
    return found


def ratios(prepared: Prepared, *cards: str) -> tuple[float, ...]:
    return measured_ratios(prepared.config, prepared.work, prepared.plan.choice, cards)


@pytest.mark.nightly
def test_a_probe_measures_the_worst_bucket_and_the_next_plan_is_corrected(tmp_path: Path) -> None:
    prepared, said = prepare(tmp_path), list[str]()
    assert prepared.plan.margin.origin is Provenance.ASSUMED
    found = probed(prepared, card("cpu"), said)
    assert found.outcome is ProbeOutcome.MEASURED, found
    assert found.predicted_bytes == max(bucket.live.value for bucket in prepared.plan.buckets)
    assert 0.95 < found.ratio < 1.5
    assert found.step_s > 0
    assert RSS_IS_MEANT in found.notes
    assert said[-1] == "probe of cpu: measured"
    assert ratios(prepared, "cpu") == (found.ratio,)
    pace = measured_pace(prepared.config, prepared.work, prepared.plan.choice, ["cpu"])
    assert pace == found.step_s / found.predicted_s
    assert ratios(prepared, "cpu", "another") == ()
    averaging = replace(prepared, work=replace(prepared.work, settings=replace(prepared.work.settings, ema=0.9)))
    assert ratios(averaging, "cpu") == ()
    after = prepared.planned(*measured_ratios(prepared.config, prepared.work, prepared.plan.choice, ["cpu"]))
    assert after.margin.origin is Provenance.MEASURED
    assert after.margin.factor == pytest.approx(max(found.ratio, 0.9) * 1.02)


@pytest.mark.nightly
def test_a_probe_that_takes_all_memory_says_that_it_needs_more_than_it_had(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "held = [b'x' * 2**24 for _ in range(200)]", cluster__train__mem="1GiB")
    found = probed(prepared, card("cpu"))
    assert found.outcome is ProbeOutcome.DIED, found
    assert found.error is None
    assert found.measured_bytes > 0.3 * GIB
    assert ratios(prepared, "cpu") == (found.ratio * DIED_GROWTH,)
    (peak,) = peaks_of(prepared.config).of(model_name(prepared.work, prepared.plan.choice), "cpu")
    assert peak.died
    assert prepared.planned(*ratios(prepared, "cpu")).margin.factor > found.ratio


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("crime", "why"),
    [
        ("oops", "NameError"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),  # far below its memory
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_probe_that_fails_says_why_and_which_log_and_is_no_measurement(tmp_path: Path, crime: str, why: str) -> None:
    found = probed(prepared := prepare(tmp_path, crime), card("cpu"))
    assert found.outcome is ProbeOutcome.FAILED, found
    assert isinstance(found.error, JobFailed)
    assert why in found.why
    assert crime != "oops" or why in Path(found.log).read_text()
    assert found.error.remedy == f"cat {found.log}"
    assert ratios(prepared, "cpu") == ()


def test_a_probe_that_cannot_be_submitted_says_what_to_change(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, cluster__train__cpus=2)
    found = probed(prepared, card("cpu"))
    assert found.outcome is ProbeOutcome.REFUSED
    assert isinstance(found.error, SubmissionRefused)
    assert found.error.remedy == "pipeline plan train --probe --set cluster.train.cpus=1"
    assert list((tmp_path / "runs" / FOLDER).iterdir()) == []


def test_a_task_without_examples_cannot_be_probed(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    bare = replace(prepared, work=replace(prepared.work, task=object()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        probed(bare, card("cpu"))


def test_a_plan_that_shards_cannot_be_probed_on_one_card(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    sharded = replace(prepared.plan, choice=replace(prepared.plan.choice, shards=2))
    with pytest.raises(ConfigError):
        probed(replace(prepared, plan=sharded), card("cpu"))


def draft(prepared: Prepared, card_name: str = "cpu") -> ProbeFolder:
    """Return the folder of a probe as its job finds it."""
    with LocalExecutor(Machine(1, (), 8 * GIB)) as executor:
        asked = (prepared.config, prepared.work, prepared.plan, prepared.oracle, card(card_name), executor)
        return draft_probe(prepared.config, *errand_of(*asked, prepared.folder))[0]


def test_a_probe_nobody_waited_for_has_written_down_what_it_measured(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    peak = run_probe(draft(prepared)).peak
    assert (peak.died, ratios(prepared, "cpu")) == (False, (peak.ratio,))
    assert peak.predicted_bytes == max(bucket.live.value for bucket in prepared.plan.buckets)


def test_torchs_own_out_of_memory_error_is_a_measurement(tmp_path: Path) -> None:
    folder = draft(prepare(tmp_path, "torch.empty(2**58)"))
    result = run_probe(folder)
    assert result.peak.died
    assert read_plain(folder.result, ProbeResult) == result


def test_a_step_that_was_killed_had_at_least_what_was_free_or_what_it_took(tmp_path: Path) -> None:
    for peak_bytes, had_bytes in ((0, 2 * GIB), (GIB, 2 * GIB), (3 * GIB, 3 * GIB - 1000)):
        (folder := tmp_path / str(peak_bytes)).mkdir()
        probed_folder = draft(prepared := prepare(folder))
        write_plain(probed_folder.start, BeforeModel("cpu", "", 1000, 2 * GIB))
        result = record_death(probed_folder, peak_bytes)
        assert result is not None
        assert (result.peak.died, result.peak.measured_bytes) == (True, had_bytes)
        assert ratios(prepared, "cpu") != ()


def test_a_probe_that_dies_before_its_step_says_nothing_of_the_step(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    assert record_death(draft(prepared), GIB) is None
    assert ratios(prepared, "cpu") == ()


def test_on_a_gpu_what_is_predicted_is_what_the_allocator_reserves_for_the_probes_own_steps(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    gpu = replace(CardSpec.of(device("a100-40gb"), 1), name="a100")
    on_gpu = replace(prepared.work, device="cuda")
    with LocalExecutor(Machine(1, ("0",), 64 * GIB)) as executor:
        asked = (prepared.config, on_gpu, prepared.plan, prepared.oracle, gpu, executor)
        errand, request = errand_of(*asked)
    live = max(bucket.live.value for bucket in prepared.plan.buckets)
    assert live <= errand.peak.predicted_bytes < 1.3 * live
    assert errand.peak.predicted_bytes % (2 << 20) == 0  # segments are of whole 2 MiB
    assert (errand.device, errand.peak.card) == ("cuda", "a100")
    assert request.mem_bytes == errand.mem_bytes > 2 * GIB  # a CUDA context's worth of the node, not the card's memory
    assert errand.mem_bytes < 8 * GIB
