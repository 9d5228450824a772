"""Offers: where training may run. On named GPUs, on those of the cluster, or in a node's memory without GPUs."""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import Job, Request
from pipeline.errors import ConfigError, PlanInfeasible, SubmissionRefused
from pipeline.memory.footprint import LIVE_ONLY, Provenance
from pipeline.memory.hardware.gpus import device
from pipeline.memory.hardware.host_memory import (
    STEP_SLACK,
    TRAINING,
    HostPart,
    TrainingJob,
    measured_baseline,
    measured_in,
    train_need,
)
from pipeline.memory.planning.memory_plan import CardSpec, Offer
from pipeline.planning.training_work import host_card
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.cluster.job_spec import Executor
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import CardSection as SiteCard
    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.hardware.gpus import Device
    from pipeline.project.project import Project

log = logging.getLogger(__name__)

NAME = "train"
ASSUMED_BYTES = 16 << 30  # of a node, if Slurm does not say it
_OFFER = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A request to plan training: its configuration and items, and where it may run."""

    config: Config
    project: Project
    executor: Executor
    gpus: Sequence[str] = ()  # GPUs, as typed
    by_plan: bool = False  # asked by `plan`, not `submit`: GPUs may be typed, and items need no graphs yet
    detailed: bool = False  # also compare batch configurations, which takes more traces
    sizes: Mapping[str, int] | None = None  # of an item, as typed; the data set is then not read
    beside: Path | None = None  # where the task's modules may be
    say: Callable[[str], None] = lambda _: None

    @property
    def baseline(self) -> HostPart:
        """The memory of a process with torch: that of the fork server, else measured in a child process."""
        forked_bytes = getattr(self.executor, "imported_bytes", 0)
        return measured_in(forked_bytes, TRAINING) if forked_bytes else measured_baseline()


def offers_of(question: Question, *, on_cpu: bool) -> list[Offer]:
    """Return the named GPUs, else those of the cluster; the plan is for the first, the others are compared."""
    config = question.config
    ranks = config.cluster.train.world
    if question.gpus:
        return [_offer(text, ranks, config.train) for text in question.gpus]
    if on_cpu:
        nodes = config.cluster.slurm.cards
        hosts = tuple(_host_card(question, node.partition or node.feature or "", node.mem) for node in nodes)
        return [Offer("memory of a node", ranks, hosts or (_host_card(question),))]
    if config.cluster.slurm.cards:
        cards = tuple(card_of(_device(site), ranks, config.train) for site in config.cluster.slurm.cards)
        return [Offer(", ".join(card.name for card in cards), ranks, cards)]
    without = "without GPUs: --set cluster.train.gpus=0"
    if question.by_plan:
        what = "which GPU is it for? None was named, and cluster.slurm.cards is empty"
        remedy = f"pipeline plan train --gpu a100-80gb   (or a size: 24GiB); {without}"
        raise ConfigError(what, where="--gpu", remedy=remedy)
    what = "training asks for GPUs, and cluster.slurm.cards says of none what it is"
    remedy = f"--set 'cluster.slurm.cards=[{{gres: a100, mem: 40GiB}}]'   (each that a job may get); {without}"
    raise ConfigError(what, where="cluster.slurm.cards", remedy=remedy)


def card_of(gpu: Device, ranks: int, train: TrainSection) -> CardSpec:
    """Return what a training may use of a GPU."""
    return CardSpec.of(gpu, ranks, fraction=train.memory_fraction, share=train.sweep.share)


def _offer(text: str, ranks: int, train: TrainSection) -> Offer:
    """Parse an offer: 3xa100-40gb, or 3xa100-40gb,v100-32gb for a job that may get either."""
    parts = [_OFFER.findall(part.strip())[0] for part in text.split(",")]
    counts = {int(count) for count, _ in parts if count} or {ranks}
    ranks = counts.pop()
    if counts or ranks < 1:
        problem = "names several numbers of GPUs" if counts else "asks for no GPU"
        raise ConfigError(f"{text!r} {problem}", where="--gpu", remedy="write 2xa100-80gb, a100-80gb or 24GiB")
    cards = tuple(card_of(device(name), ranks, train) for _, name in parts)
    return Offer(f"{ranks} x {', '.join(card.name for card in cards)}", ranks, cards)


def _device(site: SiteCard) -> Device:
    """Return a GPU of the cluster: its speed follows from its name, its memory from the configuration."""
    name = site.gres or site.feature or ""
    try:
        known = device(name)
    except ConfigError:
        known = replace(device(f"{site.mem >> 20}MiB"), name=name or f"{site.mem >> 30} GiB")
    return replace(known, usable_bytes=min(known.usable_bytes, site.mem))


def site_card(config: Config, card: CardSpec) -> SiteCard | None:
    """Return the configured GPU that a job requests for this card."""
    if not card.caching:
        return next((site for site in config.cluster.slurm.cards if card.name in (site.partition, site.feature)), None)
    named = (site for site in config.cluster.slurm.cards if site.gres or site.feature)
    return next((site for site in named if _device(site).name == card.name), None)


def waits(question: Question, offers: Sequence[Offer], mem_bytes: int) -> Iterator[tuple[str, float]]:
    """Yield how long a job of each offer would wait, if the cluster has such GPUs and Slurm estimates a start."""
    resources = question.config.cluster.train
    for offer in offers:
        site = site_card(question.config, offer.cards[0])
        if site is None:
            continue
        request = replace(
            Request.of(resources).on_card(site), gpus=ceil(offer.ranks / resources.nodes), mem_bytes=mem_bytes
        )
        job = Job(NAME, ("true",), range(1), str(question.config.cluster.runs), request)
        with suppress(SubmissionRefused):
            starts = question.executor.starts(job)
            if starts is not None:
                yield offer.name, max(0.0, starts - time.time())


def _host_card(question: Question, name: str = "", mem_bytes: int | None = None) -> CardSpec:
    """Return the memory that a node without GPUs leaves for a step, as a card."""
    resources = question.config.cluster.train
    if resources.mem != "auto":
        mem_bytes = resources.mem
    elif mem_bytes is None:
        mem_bytes = question.executor.limits_of(replace(Request.of(resources), gpus=0)).mem_bytes
    if mem_bytes is None:
        mem_bytes = ASSUMED_BYTES
        log.warning("Slurm reports no memory of a node: %s are assumed (cluster.train.mem)", format_bytes(mem_bytes))
    mem_bytes //= resources.ranks_per_node * (question.config.train.sweep.share if resources.mem == "auto" else 1)
    process_bytes = train_need(TrainingJob(gpu=False), question.baseline).total_bytes
    budget = int((mem_bytes - process_bytes) / (1 + STEP_SLACK + LIVE_ONLY[Provenance.ASSUMED] / 2))
    if budget <= 0:
        what = f"{mem_bytes >> 20} MiB do not hold Python and torch alone, which take {process_bytes >> 20} MiB"
        raise PlanInfeasible(what, where="cluster.train.mem", remedy="--set cluster.train.mem=4GiB")
    card = host_card(budget)
    return replace(card, name=name) if name else card


def is_known(card: CardSpec) -> bool:
    """Tell whether a card is known by its name."""
    try:
        device(card.name)
    except ConfigError:
        return False
    return True
