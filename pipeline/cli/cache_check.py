"""`pipeline cache validate`, `repair` and `compact`."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.help import option
from pipeline.cli.options import ConfigFile, Json, Sets, Yes, as_typed, load_config, refuse, show, show_dry_run
from pipeline.command_line import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

    from pipeline.config.load import LoadedConfig
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance.checking import Subset
    from pipeline.store.maintenance.damage_report import Checked, ReportWriter, Summary
    from pipeline.store.maintenance.shard_plans import Repaired, ShardPlan
    from pipeline.store.store import Store

    Look = Callable[..., Iterator[Checked]]

COUNTED = ("shards", "bytes", "records", "whole", "listed", "lost", "faults")
SHOWN = 5  # most files listed that a repair does not change
_OUT = Command.of("cache validate --out FILE", then="   (in a folder where you can write)")


def validate_command(
    quick: Annotated[bool, option("--quick", "Check only the structure: two reads per file, and the index.")] = False,
    full: Annotated[bool, option("--full", "Check every byte and every record (the default).")] = False,
    semantic: Annotated[
        bool, option("--semantic", "Like --full, and rebuild a sample of the records and compare.")
    ] = False,
    sample: Annotated[
        float | None,
        option(
            "--sample P", "With --semantic: share of the records to rebuild. Default: cache.sample.", min=0.0, max=1.0
        ),
    ] = None,
    subset: Annotated[str, option("--subset n/t", "Check only the n-th of t parts, such as 1/8.")] = "1/1",
    kind: Annotated[list[str] | None, option("--kind KIND", "Check only records of this kind.")] = None,
    out: Annotated[
        Path | None, option("--out FILE", "Write the damage list to this file. Default: into the cache.")
    ] = None,
    verdicts: Annotated[
        Path | None, option("--verdicts FILE", "Write one JSON line per record to this file, intact records included.")
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Check the cache for damage (read-only); exit with 4 if damaged.

    Examples:
    pipeline cache validate --full          # read every byte
    pipeline cache validate --subset 1/8    # a part, for a job of its own
    """
    from pipeline.store.maintenance.checking import Subset
    from pipeline.store.maintenance.damage_report import damage_found

    how = _how(sample, quick=quick, full=full, semantic=semantic)
    loaded = load_config(config, sets)
    cache = _open(loaded)
    part = Subset.parse(subset)
    stores = [cache.kind(name) for name in _kinds(cache, kind)]
    collected = _Found(cache, how, part, out, kind or ())
    try:
        for checked in _watched(stores, part, how, _look(loaded, how, sample), verdicts):
            collected.take(checked)
        collected.finish()
    finally:
        collected.discard()
    _show_found(collected, as_json=as_json)
    if collected.summary.findings:
        raise damage_found(collected.summary, cache.root, collected.path)
    if out and collected.unwritten:
        refuse(f"the damage list could not be written: {collected.unwritten}", out, _OUT)


def _how(sample: float | None, *, quick: bool, full: bool, semantic: bool) -> str:
    """Return how thoroughly to check; refuse conflicting options."""
    if quick + full + semantic > 1:
        refuse("--quick, --full and --semantic cannot be combined", "--quick", Command.of("cache validate"))
    if sample is not None and not semantic:
        refuse("--sample requires --semantic", "--sample", Command.of("cache validate --semantic --sample", sample))
    return "quick" if quick else "semantic" if semantic else "full"


def repair_command(
    damage: Annotated[
        Path | None, option("--list FILE", "Repair only files in this damage list. Default: all.")
    ] = None,
    yes: Yes = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Save intact records of damaged files and rebuild the index.

    The damaged files are set aside, not deleted.
    """
    from pipeline.report import cache_tables
    from pipeline.report.live_status import WorkBar
    from pipeline.store.format.disk import ask_owner
    from pipeline.store.maintenance.damage_report import read_report, stays_left
    from pipeline.store.maintenance.shard_plans import Repaired, plan_repair, repair

    loaded = load_config(config, sets)
    cache, settle_s = _open(loaded), loaded.config.cache.visibility_s
    report = read_report(damage) if damage else None
    shown, totals = _Repairs(all=as_json), Repaired()
    files = None if report else _files([cache.kind(name) for name in cache.kinds()])
    with WorkBar("repair" if yes else "look", files) as progress:
        if yes:
            say_wait = saying_wait(settle_s)
            with ask_owner(cache.root):
                totals = repair(cache, report, done=shown.take, seen=progress.take, settle_s=settle_s, waits=say_wait)
        else:
            for plan in plan_repair(cache, report, seen=progress.take):
                totals.count(plan)
                shown.take(plan)
    table = cache_tables.mended_table(shown.kinds) if yes else cache_tables.mend_table(shown.plans, shown.more)
    files_json = [plan.to_json() for plan in shown.plans] if as_json else []
    show(
        lambda: {"root": cache.root, "done": yes, **asdict(totals), "files": files_json},
        lambda: [*cache_tables.repaired_lines(totals, did=yes), *table],
        as_json=as_json,
    )
    if totals.missing and not as_json:
        following = as_typed(Command.of("cache regenerate --list", totals.missing))
        typer.echo(f"damage list of the lost records: {totals.missing}\n  next: {following}")
    elif not (yes or as_json) and (totals.quarantined or totals.indexes):
        show_dry_run("repaired", "cache repair", *(("--list", damage) if damage else ()))
    if totals.stay and (yes or not (totals.quarantined or totals.indexes)):
        repair_again = as_typed(Command.of("cache repair --yes"))
        raise stays_left(shown.stay, totals.stay, cache.root, repair_again)


@dataclass
class _Repairs:
    """The report of a repair: shards (all or the first), and the totals of each kind."""

    all: bool
    plans: list[ShardPlan] = field(default_factory=list)
    more: int = 0  # number of omitted shards
    kinds: dict[str, Repaired] = field(default_factory=dict)
    stay: dict[Path, str] = field(default_factory=dict)  # the first files that stay, with reasons

    def take(self, plan: ShardPlan) -> None:
        """Add the repair of one shard."""
        from pipeline.report.cache_tables import FILES_SHOWN as ROWS
        from pipeline.store.maintenance.shard_plans import OUT_OF_DATE, Repaired

        self.kinds.setdefault(plan.store.kind, Repaired()).count(plan)
        if plan.stays and len(self.stay) < SHOWN:
            self.stay[plan.path] = plan.stays
        if self.all or (len(self.plans) < ROWS and plan.why != OUT_OF_DATE):
            self.plans.append(plan)
        else:
            self.more += bool(plan.shard)


def saying_wait(settle_s: float) -> Callable[[], None]:
    """Return a callback that prints how long other hosts get to see the new files."""
    message = f"waiting {settle_s:g} s for other hosts to see the new files (cache.visibility_s) ..."
    return lambda: typer.echo(message, err=True)


def compact_command(yes: Yes = False, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Merge many small cache files into a few; records are verified."""
    from pipeline.report import cache_tables
    from pipeline.store.format.disk import ask_owner
    from pipeline.store.maintenance.shard_plans import apply, plan_compaction

    loaded = load_config(config, sets)
    cache, chosen = _open(loaded), loaded.config.cache
    shard_bytes, settle_s = int(chosen.shard_bytes), chosen.visibility_s
    stores = [cache.kind(name) for name in cache.kinds()]
    compacted = [plan_compaction(store, shard_bytes=shard_bytes) for store in stores]
    if yes:
        plans = [plan for kind in compacted for plan in kind.small]
        with ask_owner(cache.root):
            list(apply(plans, shard_bytes=shard_bytes, settle_s=settle_s, waits=saying_wait(settle_s)))
    show(
        lambda: {"root": cache.root, "done": yes, "kinds": [kind.to_json(did=yes) for kind in compacted]},
        lambda: cache_tables.compacted_lines(compacted, did=yes),
        as_json=as_json,
    )
    if not (yes or as_json) and any(kind.small for kind in compacted):
        show_dry_run("merged", "cache compact")


def _look(loaded: LoadedConfig, how: str, sample: float | None) -> Look:
    """Return the function that checks the files of a kind."""
    from pipeline.store.maintenance.checking import check

    if how == "semantic":
        from pipeline.audit.meaning import Semantic
        from pipeline.project.project import Project

        share = loaded.config.cache.sample if sample is None else sample
        return Semantic(Project.open(loaded.config, remember=False), share).check
    return partial(check, quick=how == "quick")


def _open(loaded: LoadedConfig) -> CacheFolder:
    """Open the configured cache; refuse a missing one, or links that leave its folder."""
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance.leftovers import refuse_unusable

    cache = CacheFolder.over(loaded.config.cache.root, loaded.config.cache.under)
    refuse_unusable(cache)
    return cache


def _kinds(cache: CacheFolder, asked: Sequence[str] | None) -> list[str]:
    """Return the requested kinds of records; all, if none is named."""
    there = cache.kinds()
    if unknown := sorted({*(asked or ())} - {*there}):
        known = f"one of {', '.join(there) or 'none: it is empty'}"
        refuse(f"the cache has no records of kind {', '.join(unknown)}", "--kind", known)
    return [name for name in there if name in asked] if asked else there


def _files(stores: Sequence[Store], subset: Subset | None = None) -> int:
    """Count the files to check."""
    from pipeline.store.maintenance.checking import shards_of

    return sum(subset is None or name in subset for store in stores for name in shards_of(store))


def _watched(
    stores: Sequence[Store], subset: Subset, name: str, look: Look, verdicts: Path | None
) -> Iterator[Checked]:
    """Check each file and show the progress; write a verdict on each record to `verdicts`, if given."""
    from pipeline.report.live_status import WorkBar

    with ExitStack() as stack:
        progress = stack.enter_context(WorkBar(name, _files(stores, subset)))
        file = stack.enter_context(_verdicts_to(verdicts)) if verdicts else None
        for store in stores:
            for checked in look(store, subset, with_index=subset.part == 1):
                progress.take(checked)
                if file:
                    _write_verdicts(file, checked)
                yield checked


@contextmanager
def _verdicts_to(path: Path) -> Iterator[IO[str]]:
    """Open the file for verdicts; an error names that file and not the cache."""
    from pipeline.store.format.disk import unwritable, written_to

    remedy = "--verdicts FILE"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise unwritable(path, error, remedy) from error
    with written_to(path, remedy), file:  # errors of reading the cache pass unchanged
        yield file


def _write_verdicts(file: IO[str], checked: Checked) -> None:
    """Write a line of JSON for each record of a file."""
    about = {"kind": checked.kind, "shard": checked.shard}
    for good, keys in (("whole", checked.whole), ("listed", checked.listed)):
        for key in keys:
            file.write(json.dumps({**about, "key": key.hex(), "verdict": good}) + "\n")
    for finding in checked.findings:
        if finding.key:
            where = {"kind": finding.kind, "shard": finding.shard, "key": finding.key}
            verdict = {"verdict": finding.fault.value, "what": finding.what, "lost": finding.lost}
            file.write(json.dumps(where | verdict) + "\n")


class _Found:
    """Counts the findings of a validation and streams them to the damage list."""

    def __init__(self, cache: CacheFolder, how: str, subset: Subset, out: Path | None, only: Sequence[str]) -> None:
        from pipeline.store.maintenance.damage_report import Summary

        self.cache, self.out = cache, out
        self.summary: Summary = Summary(how, str(subset), begun=time.time(), only=sorted({*only}))
        self.summary.root = str(cache.root.resolve())
        self.kinds: dict[str, Summary] = {}
        self.path: Path | None = None  # the damage list
        self.unwritten = ""  # why there is no damage list
        self._writer: ReportWriter | None = self._begun()

    def take(self, checked: Checked) -> None:
        """Add the findings of one file."""
        from pipeline.store.maintenance.damage_report import Summary

        self.summary.take(checked)
        self.kinds.setdefault(checked.kind, Summary(self.summary.how)).take(checked)
        self._write(lambda writer: writer.add(*checked.findings))

    def finish(self) -> None:
        """Publish the damage list."""
        self.summary.seconds = time.time() - self.summary.begun
        self._write(self._publish)

    def discard(self) -> None:
        """Remove an unfinished damage list."""
        if self._writer:
            self._writer.discard()

    def _begun(self) -> ReportWriter | None:
        from pipeline.errors import CacheFull, CacheUnusable
        from pipeline.files import what_is_no_file
        from pipeline.store.format.cache_layout import REPORTS
        from pipeline.store.format.disk import Disk, refused_as
        from pipeline.store.maintenance.damage_report import ReportWriter

        if self.out and (other := what_is_no_file(self.out)):
            refuse(f"{other} is not a regular file", self.out, _OUT)
        try:
            if self.out:
                with refused_as("the damage list cannot be written here", _OUT):
                    return ReportWriter(Disk(), self.out.absolute().parent)
            return ReportWriter(self.cache.disk, self.cache.root / REPORTS)
        except (CacheUnusable, CacheFull) as error:
            if self.out:
                raise
            self.unwritten = error.what
            return None

    def _publish(self, writer: ReportWriter) -> None:
        self.path = writer.publish(self.summary, self.out.name if self.out else "")

    def _write(self, step: Callable[[ReportWriter], Any]) -> None:
        """Run a step of writing the list; on an error the validation continues without a list."""
        from pipeline.errors import PipelineError

        try:
            if self._writer:
                step(self._writer)
        except PipelineError as error:
            self._writer, self.unwritten = None, error.what


def _show_found(collected: _Found, *, as_json: bool) -> None:
    """Print the findings of a validation."""
    from pipeline.report.cache_tables import checked_lines

    def document() -> dict[str, Any]:
        kinds = {kind: {name: getattr(of_kind, name) for name in COUNTED} for kind, of_kind in collected.kinds.items()}
        summary = asdict(collected.summary) | {"kinds": kinds}
        return {"root": collected.cache.root, "list": collected.path, "unwritten": collected.unwritten, **summary}

    unwritten = f"the damage list could not be written: {collected.unwritten}  (--out FILE)"
    place = f"damage list: {collected.path}" if collected.path else unwritten
    show(document, lambda: checked_lines(collected.kinds, collected.summary, place), as_json=as_json)
