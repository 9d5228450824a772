"""Probes on a real cluster whose "cards" are partitions of nodes without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.slurm import SlurmExecutor
from pipeline.errors import SubmissionRefused
from pipeline.memory.footprint import Provenance
from pipeline.memory.history import Peak
from pipeline.memory.outlook import Probed, ProbeOutcome
from pipeline.memory.planning.memory_plan import CardSpec
from pipeline.planning.probe import measured_ratios, model_name, peaks_of, probe
from tests.planning.probes import GIB, Prepared, card, prepare
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.config import SHORT_LIMIT_MINUTES

pytestmark = pytest.mark.slurm
SETTINGS = {"cluster__executor": "slurm", "cluster__slurm__poll": "1s", "cluster__slurm__cards": []}
CARDS = [{"partition": "main", "mem": "1GiB"}, {"partition": "short", "mem": "1GiB"}]


def cards_of(prepared: Prepared) -> list[CardSpec]:
    return [card(one.partition or one.feature or "", one.mem) for one in prepared.config.cluster.slurm.cards]


def probed(prepared: Prepared, said: list[str], executor: SlurmExecutor | None = None) -> tuple[Probed, ...]:
    with executor or SlurmExecutor(prepared.config.cluster.slurm, poll_s=0.2) as opened:
        asked = (
            prepared.config,
            prepared.work,
            prepared.plan,
            prepared.oracle,
            cards_of(prepared),
            opened,
            said.append,
        )
        return probe(*asked, beside=prepared.folder)


def remembered(prepared: Prepared, card_name: str) -> list[Peak]:
    return peaks_of(prepared.config).of(model_name(prepared.work, prepared.plan.choice), card_name)


def ratios(prepared: Prepared, *cards: str) -> tuple[float, ...]:
    return measured_ratios(prepared.config, prepared.work, prepared.plan.choice, cards)


@pytest.mark.nightly
def test_every_kind_of_card_gets_a_job_and_the_next_plan_is_corrected(healthy: Cluster, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, **{**SETTINGS, "cluster__slurm__cards": CARDS})
    found = probed(prepared, said := [])
    assert [(one.card, one.outcome) for one in found] == [
        ("main", ProbeOutcome.MEASURED),
        ("short", ProbeOutcome.MEASURED),
    ], found
    assert all(0.95 < one.ratio < 1.5 and one.step_s > 0 for one in found)
    assert {"probe of main: measured", "probe of short: measured"} <= set(said)
    jobs = [line.partition("job ")[2] for line in said[:2]]
    rows = healthy.run("sacct", "-n", "-P", "-X", "-j", ",".join(jobs), "-o", "Partition,TimelimitRaw").stdout
    assert set(rows.split()) == {"main|15", f"short|{SHORT_LIMIT_MINUTES}"}
    assert ratios(prepared, "main", "short") == tuple(one.ratio for one in found)
    known = measured_ratios(prepared.config, prepared.work, prepared.plan.choice, ["main", "short"])
    after = prepared.planned(*known)
    assert (prepared.plan.margin.origin, after.margin.origin) == (Provenance.ASSUMED, Provenance.MEASURED)
    assert after.margin.factor == pytest.approx(max(*(one.ratio for one in found), 0.9) * 1.02)


@pytest.mark.nightly
def test_a_probe_with_too_little_memory_is_killed_and_says_what_it_needs(healthy: Cluster, tmp_path: Path) -> None:
    small = {**SETTINGS, "cluster__slurm__cards": CARDS[:1], "cluster__train__mem": "512MiB"}
    prepared = prepare(tmp_path, width=768, **small)
    (found,) = probed(prepared, [])
    assert found.outcome is ProbeOutcome.DIED, found
    assert 0 < found.measured_bytes < GIB // 2
    assert found.why.endswith("raise cluster.train.mem (now 536,870,912)")
    healthy.until(lambda: "oom-kill" in Path(found.log).read_text(), "Slurm to say that the kernel did it")
    (peak,) = remembered(prepared, "main")
    assert (peak.died, peak.measured_bytes) == (True, found.measured_bytes)


class Interrupted(SlurmExecutor):
    """An executor whose waiting somebody ends."""

    def step(self, timeout_s: float) -> list:  # type: ignore[type-arg]
        raise KeyboardInterrupt


@pytest.mark.nightly
def test_a_probe_that_nobody_waits_for_corrects_the_next_plan(healthy: Cluster, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, **{**SETTINGS, "cluster__slurm__cards": CARDS[:1]})
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        probed(prepared, said, Interrupted(prepared.config.cluster.slurm))
    assert said[-1].startswith("the probes continue")
    healthy.until(lambda: ratios(prepared, "main") != (), "the probe to write down what it measured", 60.0)
    assert not remembered(prepared, "main")[0].died


def test_what_the_cluster_refuses_is_told_with_the_key_to_change(healthy: Cluster, tmp_path: Path) -> None:
    unknown = [{"partition": "main", "feature": "nowhere", "mem": "1GiB"}]
    (found,) = probed(prepare(tmp_path, **{**SETTINGS, "cluster__slurm__cards": unknown}), [])
    assert found.outcome is ProbeOutcome.REFUSED
    assert isinstance(found.error, SubmissionRefused)
    assert found.error.remedy.startswith("pipeline plan train --probe --set cluster.train.constraint=")
