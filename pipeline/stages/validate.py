"""Stage validate: checks every file of the cache, in tasks of equal size, and merges what they find."""

from __future__ import annotations

import json
import logging
import time
from array import array
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.dataset import worklist
from pipeline.dataset.worklist import Lines, StageSurvey
from pipeline.errors import CacheFull, CacheUnusable
from pipeline.journal.attempts import left_out_items
from pipeline.stage_names import StageName
from pipeline.stages.embed import embed_bytes
from pipeline.stages.scan import scan_bytes
from pipeline.stages.stage import Judged, Stage, wait_until_complete
from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.checking import check, shards_of
from pipeline.store.maintenance.damage_report import (
    REPORT_SUFFIX,
    DamageFinding,
    Fault,
    ReportWriter,
    Summary,
    damage_found,
    read_report,
)
from pipeline.store.maintenance.leftovers import refuse_unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance.damage_report import Checked
    from pipeline.store.store import Store

    Check = Callable[..., Iterator[Checked]]

log = logging.getLogger(__name__)

INDEX = "index"  # the name of an index for people, in place of a shard's
MEM_BYTES = 512 << 20
BYTES_PER_S = {"quick": 2 << 30, "full": 200 << 20, "semantic": 20 << 20}  # a cautious value, used only to size tasks
WORTHWHILE_S = 10  # below this, another task costs more than it saves
FOUND = "findings"  # the figure in which tasks report findings


class CacheFile(NamedTuple):
    """A file of the cache, as the list of a run names it."""

    kind: str
    shard: str  # empty: the index

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.shard or INDEX}"


@dataclass(slots=True)
class Validated(Judged):
    """The result of a validation; its items are files."""

    summary: Summary = field(default_factory=lambda: Summary(""))
    report: str = ""  # the damage list
    shards: int = 0  # shards among the files; the others are indexes


class ValidateStage(Stage):
    """Checks every file of a cache and lists the damage."""

    name = StageName.VALIDATE
    counts_items = False
    unit = "file"
    may_be_empty = True
    only_looks = True
    lists_lines = True

    def wanted(self, config: Config) -> bool:  # noqa: ARG002
        return False

    def inspect(self, project: Project) -> None:
        refuse_unusable(project.cache)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """List every file of the cache, and cut the list into tasks."""
        offsets, sizes = array("Q"), array("Q")
        with Lines(folder.todo(self.name) if folder else None) as lines:
            for part in _cache_files(project.cache):
                offsets.append(lines.position)
                sizes.append(_size(project.cache, part))
                lines.write(json.dumps(part))
            offsets.append(lines.position)
        sizes_N = np.frombuffer(sizes, np.uint64).astype(np.int64)
        counts = {"items": len(sizes_N), "refused": 0, "unusable": 0, "cached": 0, "missing": len(sizes_N)}
        resources, seconds = (
            project.config.cluster.validate,
            int(sizes_N.sum()) / BYTES_PER_S[project.config.cache.check],
        )
        tasks = worklist.tasks_for(seconds, resources.minutes_per_task, at_once, WORTHWHILE_S)
        return StageSurvey(counts, worklist.cut_lines(offsets, sizes_N, resources.items_per_task, tasks))

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a task: buffers; for semantic checks also that of scanning and embedding."""
        cache = project.config.cache
        if cache.check == "semantic" and cache.sample:
            return MEM_BYTES + scan_bytes(project.config) + sum(map(embed_bytes, project.encoders.values()))
        return MEM_BYTES * (2 if cache.check == "semantic" else 1)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        """Return the choices under which measurements of its tasks are kept."""
        return {"check": project.config.cache.check, "sample": project.config.cache.sample}

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Check the files of one task, and publish its findings all at once."""
        shard = worklist.read_shard(folder, self.name, task)
        barred = left_out_items(folder, self.name)
        parts = [part for part in _read_list(folder, shard.start, shard.end) if part.name not in barred]
        check, how = _check_of(project), project.config.cache.check
        summary = Summary(how, begun=time.time(), root=str(project.cache.root.resolve()))
        writer = ReportWriter(Disk(), folder.found(self.name))
        context.report.figures[FOUND] = 0
        try:
            for kind, group in groupby(parts, key=lambda part: part.kind):
                asked = set(group)
                for checked in _checked(project.cache.kind(kind), check, asked, context):
                    summary.take(checked)
                    for finding in checked.findings:
                        writer.add(finding)
                    context.report.figures[FOUND] = summary.findings
                    if CacheFile(checked.kind, checked.shard) in asked:  # skips files of other tasks
                        yield None
            summary.seconds = time.time() - summary.begun
            # Named by its range, so that a second attempt replaces the report of the first.
            writer.publish(summary, f"{shard.start:012d}-{shard.end:012d}{REPORT_SUFFIX}")
        finally:
            writer.discard()

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Validated:
        """Merge the findings when every file was checked."""

        def count() -> Validated:
            validated = Validated()
            reports: list[Path] = []
            for start, end, path in _ranges(folder):
                parts = list(_read_list(folder, start, end)) if path is None else []
                validated.undone += len(parts)
                validated.first_undone = validated.first_undone or (parts[0].name if parts else "")
                reports += [path] if path else []
            if not validated.undone:
                _merge(project, folder, reports, validated)
            return validated

        return wait_until_complete((), count, patience_s)

    def check(self, project: Project, folder: RunFolder, judged: Validated) -> list[str]:  # noqa: ARG002
        """Raise if anything is damaged."""
        if judged.summary.findings:
            raise damage_found(judged.summary, project.cache.root, Path(judged.report))
        return []


def _cache_files(cache: CacheFolder) -> Iterator[CacheFile]:
    """Yield the files of a cache that can be checked."""
    for kind in cache.kinds():
        store = cache.kind(kind)
        if store.disk.exists(store.layout.index):
            yield CacheFile(kind, "")
        yield from (CacheFile(kind, shard) for shard in shards_of(store))


def _size(cache: CacheFolder, part: CacheFile) -> int:
    """Return the size of a file; 0 for one that is gone."""
    layout = cache.kind(part.kind).layout
    try:
        return cache.disk.size_of(layout.shard(part.shard) if part.shard else layout.index)
    except OSError:
        return 0


def _check_of(project: Project) -> Check:
    """Return the configured check: quick, full or semantic."""
    if project.config.cache.check == "semantic":
        from pipeline.audit.meaning import Semantic

        return Semantic(project, project.config.cache.sample).check
    return partial(check, quick=project.config.cache.check == "quick")


def _checked(store: Store, check: Check, parts: set[CacheFile], context: TaskContext) -> Iterator[Checked]:
    """Check some files of one kind, noting each before it is read."""
    names = frozenset(part.shard for part in parts if part.shard)

    def note_shard(shard: str) -> None:
        context.on((CacheFile(store.kind, shard).name,))

    return check(store, names, with_index=len(names) < len(parts), on=note_shard)


def _read_list(folder: RunFolder, start: int, end: int) -> Iterator[CacheFile]:
    """Yield the files between two offsets of the list."""
    with folder.todo(StageName.VALIDATE).open("rb") as file:
        file.seek(start)
        while file.tell() < end:
            yield CacheFile(*json.loads(file.readline()))


def _ranges(folder: RunFolder) -> Iterator[tuple[int, int, Path | None]]:
    """Yield ranges that cover the whole list, each with its report or None.

    If a task and the halves that replaced it have all published reports, the report of the whole counts.
    """
    published: dict[int, tuple[int, Path | None]] = {}
    # Of reports that begin at the same place, the longest is last.
    for path in sorted(folder.found(StageName.VALIDATE).glob(f"*{REPORT_SUFFIX}")):
        start, end = map(int, path.stem.split("-"))
        published[start] = end, path
    at, whole = 0, folder.todo(StageName.VALIDATE).stat().st_size
    while at < whole:
        end, report = published.get(at, (min((start for start in published if start > at), default=whole), None))
        yield at, end, report
        at = end


def _merge(project: Project, folder: RunFolder, reports: list[Path], validated: Validated) -> None:
    """Merge the reports into the cache, or into the run's folder where the cache cannot be written."""
    begun = datetime.fromtimestamp(folder.stages.stat().st_mtime, UTC)  # the newest report is the last by name
    name = f"{begun:%Y%m%dT%H%M%SZ}-{folder.unique.rpartition('-')[2]}-{StageName.VALIDATE}{REPORT_SUFFIX}"
    try:
        writer = ReportWriter(project.cache.disk, project.cache.root / REPORTS)
        path = _merged(folder, reports, validated, writer, name)
    except (CacheUnusable, CacheFull) as error:
        log.warning("the damage list is in the run's folder: %s", error.what)
        path = _merged(folder, reports, validated, ReportWriter(Disk(), folder.path), name)
    validated.report = str(path)
    with folder.todo(StageName.VALIDATE).open("rb") as file:
        for part in (CacheFile(*json.loads(line)) for line in file):
            validated.items += 1
            validated.shards += bool(part.shard)


def _merged(folder: RunFolder, reports: list[Path], validated: Validated, writer: ReportWriter, name: str) -> Path:
    """Write the merged report; return its path."""
    summary = validated.summary = Summary("")
    try:
        for report in map(read_report, reports):
            summary.how = report.summary.how
            summary.add(report.summary)
            for finding in report.findings():
                writer.add(finding)
        for key, (_, detail) in left_out_items(folder, StageName.VALIDATE).items():
            kind, _, shard = key.partition("/")
            finding = DamageFinding(kind, Fault.UNREADABLE, detail, "" if shard == INDEX else shard)
            summary.count(finding)
            writer.add(finding)
        summary.seconds = time.time() - summary.begun
        return writer.publish(summary, name)
    finally:
        writer.discard()
