"""Sets up a rank: it joins the others, takes its device, and reads from its node's own disk.

The first rank of each node copies the records of the items to that disk; then all ranks of the node read there. This is
only for speed: records that do not fit, come late or are damaged are read from the cache.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.cluster.verdict import UNFIT
from pipeline.command_line import Command
from pipeline.config.site_profiles import anchored
from pipeline.dataset.reader_items import is_reader
from pipeline.device.kinds import CARD, CPU
from pipeline.errors import JobFailed, NodeUnfit, PipelineError
from pipeline.graphs.make_graphs import HEADER_BYTES
from pipeline.keys import KEY_BYTES, content_digest, recipe_key
from pipeline.memory.hardware.caching_allocator import allocator_settings, overruled_note
from pipeline.store.cache_folder import CACHE_FORMAT, CacheFolder
from pipeline.store.format.shard import DEFAULT_HEADER_BYTES
from pipeline.store.maintenance.transfer import CacheStaging, Unfit, open_scratch
from pipeline.training.items.residue_embeddings import Embeddings, Text, proteins
from pipeline.training.ranks import RankLost
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.store.format.record import Record
    from pipeline.store.maintenance.transfer import Keys
    from pipeline.training.items.item_table import ItemTable
    from pipeline.training.prepared import Prepared
    from pipeline.training.ranks import Ranks

WITHIN_S = 1800.0  # copying stops after this
REPORT_EVERY_S = 1.0
AT_ONCE = 256  # graphs whose sequences are looked up together
KEY = np.dtype(f"V{KEY_BYTES}")


def join_ranks(project: Project, folder: RunFolder, prepared: Prepared, context: TaskContext) -> Ranks:
    """Return this process among its ranks, on the device that it has."""
    from pipeline.training.ranks.process_group import join_process_group
    from pipeline.training.ranks.rank_monitor import HangLimits

    place = context.place
    device = take_device(project, place.local_rank, prepared)
    _look_at_node(project, folder, prepared, context, device)
    hang_s = float(project.config.train.hang)
    limits = HangLimits(hang_s=hang_s, slow_s=max(2 * hang_s, 3600.0))
    return join_process_group(place, folder.meetings, device=device, limits=limits, sharded=prepared.sharded)


def _look_at_node(project: Project, folder: RunFolder, prepared: Prepared, context: TaskContext, device: str) -> None:
    """Check the node (shared resources only on its first rank); warn of a problem, or raise to leave the node."""
    from pipeline.training.ranks.node_health import cautions, defects, may_get_another_node

    folder.meetings.mkdir(exist_ok=True)
    host_bytes = 0 if context.place.local_rank else prepared.mem_bytes
    wrong = "; ".join(defects(device, host_bytes, prepared.reserved_bytes))
    if wrong and project.config.cluster.train.unfit_node == "leave" and may_get_another_node():
        remedy = Command.submit("train").with_settings(("cluster.train.unfit_node", "warn"))
        raise NodeUnfit(f"{context.place.host} {UNFIT}: {wrong}", where="cluster.train.unfit_node", remedy=remedy)
    for what in (*cautions(device, folder.meetings), *filter(None, [wrong])):
        log_line(f"WARNING: {context.place.host}: {what}")
        context.report.warnings[what] = f"{context.place.host}: {what}"


def take_device(project: Project, local_rank: int, prepared: Prepared) -> str:
    """Return the device of a rank and make it current. The allocator must be configured before torch uses it."""
    if project.config.cluster.train.gpus:
        if prepared.allocator:
            set_allocator(prepared.allocator)
        from pipeline.device.accelerator import select_card

        select_card(local_rank)
    return device_here(project.config.cluster.train.gpus)


def set_allocator(planned: str) -> None:
    """Give torch a plan's allocator settings before it uses a card; warn if the environment overrides them."""
    if note := overruled_note(planned, os.environ):
        log_line(note)
    os.environ.update(allocator_settings(planned, os.environ))


def device_here(gpus: int) -> str:
    """Return the device of this process, which was given so many GPUs; raise if torch sees none of them."""
    from pipeline.device.accelerator import located, torch_sees

    if (device := located(CARD if gpus else CPU)) is None:
        what = f"this task was to run on a GPU, and torch sees none ({torch_sees()})"
        remedy = Command.submit("train", before="nvidia-smi   or   ").with_settings(("cluster.train.gpus", "0"))
        raise JobFailed(what, where="cluster.train.gpus", remedy=remedy)
    return device


def log_line(line: str) -> None:
    """Write a line to the log of the task."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a task's stderr is its log


def staged(
    project: Project,
    tables: Callable[[], Sequence[ItemTable]],
    ranks: Ranks,
    context: TaskContext,
    say: Callable[[str], None],
) -> Project:
    """Copy the records of these items to the node's own disk; return the project that reads them there."""
    if project.config.cache.stage is None or is_reader(project.config):  # a reader's files are not in the cache
        return project
    place = context.place
    with ranks.patient("staging"):
        folder = _Stager(project, tables(), ranks, context, say).stage() if place.local_rank == 0 else ""
        replies = ranks.exchange({"host": place.host, "folder": folder})  # waits for all nodes
    folder = next((reply["folder"] for reply in replies if reply["host"] == place.host and reply["folder"]), "")
    return replace(project, cache=project.cache.behind(CacheFolder(Path(folder)))) if folder else project


@dataclass
class _Stager:
    """Copies the records that ranks read to the node's own disk; runs on the first rank of each node."""

    project: Project
    tables: Sequence[ItemTable]
    ranks: Ranks
    context: TaskContext
    say: Callable[[str], None]
    begun: float = 0.0
    reported: float = 0.0

    def stage(self) -> str:
        """Copy as much as time and room allow, and log it; return the scratch folder, or '' if it is empty."""
        self.begun, scratch = time.monotonic(), None
        try:
            scratch = open_scratch(self._place(), self._name(), self.project.cache.disk)
            self.say(self._copy(scratch))
        except RankLost:
            raise
        except (Unfit, PipelineError, OSError) as error:
            problem = error.what if isinstance(error, PipelineError) else str(error)
            self.say(f"not all is staged: {problem}; the rest is read from {self.project.cache.root}")
        return str(scratch.root) if scratch is not None and scratch.kinds() else ""

    def _copy(self, scratch: CacheFolder) -> str:
        """Copy graphs and the embeddings of their sequences; return a line for the log."""
        config = self.project.config
        staging = CacheStaging(self.project.cache, scratch, shard_bytes=config.cache.shard_bytes, goes_on=self._goes_on)
        if staging.is_done():
            return f"staged in {scratch.root} by an earlier job: nothing is to be copied"
        try:
            embeddings = self._embeddings_of(staging.take("graph", self._graphs(), HEADER_BYTES))
            for _ in staging.take("embed", embeddings, DEFAULT_HEADER_BYTES):
                pass
        finally:
            staging.finish()
            took_s = time.monotonic() - self.begun
            self.context.report.figures |= {"staged_bytes": float(staging.bytes), "staged_s": took_s}
        kinds = ", ".join(f"{count:,} of {kind}" for kind, count in staging.records.items())
        rest = "" if staging.is_whole else f"; the rest is read from {self.project.cache.root}"
        return (
            f"staged in {scratch.root}: {kinds}; {format_bytes(staging.bytes)} copied in {format_seconds(took_s)}{rest}"
        )

    def _place(self) -> Path:
        """Return the folder on this node that `cache.stage` names."""
        if not self.project.config.graph.cache:
            raise Unfit("graphs are not kept (graph.cache: false)")
        try:
            return Path(anchored(str(self.project.config.cache.stage), Path("/")))
        except ValueError as error:
            raise Unfit(f"cache.stage: {error}") from error

    def _name(self) -> str:
        """Return a name for the scratch folder, made of its graphs, its embeddings and its user."""
        embeddings = [asdict(view.encoding.recipe) for view in self.project.encoders_read]
        content: dict[str, Any] = {
            "format": CACHE_FORMAT,
            "user": os.geteuid(),
            "graphs": content_digest(self._graphs().tobytes()).hex(),
            "embeddings": embeddings[0] if len(embeddings) == 1 else embeddings,
        }
        return recipe_key("stage", content).hex()

    def _graphs(self) -> Keys:
        """Return the keys of the graphs of all items."""
        return np.unique(np.concatenate([np.ascontiguousarray(table.key_N16).view(KEY)[:, 0] for table in self.tables]))

    def _embeddings_of(self, graphs: Iterator[Record]) -> Keys:
        """Return the keys of the embeddings in the cache that some graphs need."""
        read = (view.encoding for view in self.project.encoders_read)
        encoders = ((encoding.recipe, encoding.weights.dim) for encoding in read)
        embeddings = Embeddings(self.project.cache.kind("embed"), *encoders)
        keys = bytearray()
        while chunk := list(islice(graphs, AT_ONCE)):
            texts = dict.fromkeys(text for graph in chunk for text in _texts(embeddings, graph))
            keys += b"".join(copy.key for copy in embeddings.look_up(texts)[0].values())
        return np.unique(np.frombuffer(bytes(keys), KEY))

    def _goes_on(self) -> bool:
        """Tell whether there is time to copy more; signal the waiting ranks that this one is alive."""
        now = time.monotonic()
        if now - self.reported > REPORT_EVERY_S:
            self.reported = now
            self.ranks.progress("staging")
        return now - self.begun < WITHIN_S and not self.context.ending()


def _texts(embeddings: Embeddings, graph: Record) -> Iterable[Text]:
    """Yield the encoded sequences of a graph's partners; none of a rejected item."""
    with suppress(KeyError):
        for partner in graph.meta["partners"]:
            yield from embeddings.texts(proteins(partner["chains"]))
