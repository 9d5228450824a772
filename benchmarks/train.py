"""Training on a warm cache, complexes a second: against research code's kind of loop, and two ranks against one.

    python benchmarks/train.py [--complexes N] [--rounds N] [--out FILE]

Both sides train the same model (`pipeline.tasks.interface`) with the same optimizer on the same made complexes, real
graphs with embeddings of 1,280 numbers, on one thread. Ours is the loop that `pipeline submit --stage train` runs, with
its plan, its loader and its checkpoints. The other side is what is found in research code: batches by count in a
shuffled order, no worker process, each complex read from a pickle of torch tensors (embeddings in float32, as ESM gives
them) when its turn comes. There are two of it: `sequential` goes forward and backward complex by complex, `padded` runs
a batch at once, every partner with as many residues and edges as the largest of the batch (rows that have no part in
the loss, so that its value is the same). Before anything is timed, the losses of the same complexes under the same
parameters are compared.

Each measurement is a process of its own; the sides take turns, and ratios are of neighbours. Time is taken from the end
of the first epoch to the end of the last, checkpoints in between included. Of two ranks, each has a core of its own;
so has one. Processor time a complex is noted as well: other work on the machine changes it less.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.loader import ENCODER, generate, loader_of  # noqa: E402 - the project is found only now

TASK = "pipeline.tasks.interface:Interface"
OPTIONS = {"embedding_dim": 1280, "width": 16, "layers": 2, "pair_width": 4, "pair_layers": 0}
BATCH = 8
EPOCHS = 3  # of which the first is not timed
LIMIT_BYTES = 4 << 30  # of a process
SEED = 0
REACH = {"ratio": 1.5, "wait_share": 0.02, "two_ranks": 1.6}


def settings() -> Any:
    """Return what a configuration would say of the training."""
    from pipeline.config.schema import Train, Validation

    return Train(
        task=TASK,
        options={**OPTIONS},
        effective_batch=BATCH,
        epochs=EPOCHS,
        split=None,
        validation=Validation(split=None),
    )


def work_of(train: Any) -> Any:
    """Return the task as it is trained."""
    from pipeline.runs.planning import Work, step_settings
    from pipeline.runs.tasks import load_task

    return Work(load_task(train.task, train.options), step_settings(train, "cpu"), "cpu")


def table_of(root: Path, key: bytes) -> Any:
    from pipeline.store.cache import Cache
    from pipeline.training.dataset import Table

    return Table.read(Cache(root).kind("sets"), key)


# ---- ours ----


def plan(root: Path, key: bytes, ranks: int) -> dict[str, Any]:
    """Plan the training, as it is done before a submission."""
    from pipeline.memory.footprint import Choice
    from pipeline.runs.planning import host_card, plan_training, request_of, sizes_of, target_of

    train = settings()
    work = work_of(train)
    sizes = sizes_of(work.task, table_of(root, key).sizes)
    made, _ = plan_training(work, train, sizes, [host_card(LIMIT_BYTES)], target_of(None), request_of(train, ranks))
    assert made.choice == Choice(precision="fp32"), made.choice
    return prepared_of(made, key.hex(), EPOCHS, ranks)


def prepared_of(made: Any, key: str, epochs: int, ranks: int) -> dict[str, Any]:
    """Return what a submission makes of a plan."""
    from pipeline.training.prepared import Prepared, stretch_of

    return Prepared(
        name=f"bench-{ranks}",
        recipe={},
        table=key,
        precision=made.choice.precision,
        checkpointing=made.choice.checkpointing,
        offload=made.choice.offload,
        sharded=False,
        stretches=(stretch_of("all items", epochs, made, {}),),
        limit_bytes=made.limit_bytes,
        margin=made.margin.factor - 1,
        ranks=ranks,
        cpus=1,
        mem_bytes=ranks * LIMIT_BYTES,
        mem_why="",
        allocator=made.allocator.settings,
        step_s=made.step_s.value,
    ).to_json()


def ours(root: Path, key: bytes, prepared: dict[str, Any], part: str, folder: Path) -> dict[str, Any]:
    """Train, as one rank of those that there are; return what the first of them measured."""
    from pipeline.memory.footprint import Choice
    from pipeline.records import Tell
    from pipeline.stages.train import Job, train
    from pipeline.training.distributed import gather
    from pipeline.training.embeddings import Embeddings
    from pipeline.training.figures import read_epochs
    from pipeline.training.prepared import ModelFolder, Prepared
    from pipeline.training.rendezvous import Place
    from pipeline.training.source import Cached

    table, planned = table_of(root, key), Prepared.from_json(prepared)
    work = work_of(settings())
    stores = cache_of(root)
    made = ModelFolder(folder)
    made.path.mkdir(parents=True, exist_ok=True)
    tell = Tell(lambda *_: None)
    clock = Clock()
    with closing(gather(Place.told(part, folder.name), folder)) as ranks:
        job = Job(
            train=settings(),
            prepared=planned,
            folder=made,
            make_step=lambda begin: work.begun(Choice(precision="fp32"), device="cpu", begin=begin),
            source=lambda one: Cached(stores.kind("graph"), one),
            embeddings=lambda: Embeddings(stores.kind("embed"), ENCODER),
            stretches=[(planned.stretches[0], items_of(table, work, planned))],
            validation=None,
            ranks=ranks,
            tell=tell,
            say=lambda line: print(line, file=sys.stderr),
            measure=work.task.cost,
        )
        for _ in train(job):
            clock.tick()
    if not part.startswith("0/"):
        return {}
    epochs = read_epochs(made.path)
    assert [one.items for one in epochs] == [len(table)] * EPOCHS, epochs
    return {
        **clock.figures(len(table)),
        "wait_share": max(one.wait_share for one in epochs[1:]),
        "micro_batches_per_step": epochs[-1].micro_batches / epochs[-1].steps,
        "loss": dict(epochs[-1].loss),
        "ooms": sum(one.ooms for one in epochs),
    }


class Clock:
    """Notes when each step of all epochs has ended."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note a step."""
        self._marks.append((time.perf_counter(), time.process_time()))

    def figures(self, complexes: int) -> dict[str, float]:
        """Return what came after the first epoch."""
        first = -(-complexes // BATCH) - 1
        assert len(self._marks) == EPOCHS * (first + 1), len(self._marks)
        wall, cpu = (np.array(column[first:]) for column in zip(*self._marks, strict=True))
        timed = (EPOCHS - 1) * complexes
        return {
            "complexes_per_s": timed / (wall[-1] - wall[0]),
            "step_s": statistics.median(np.diff(wall).tolist()),
            "cpu_ms_per_complex": 1e3 * (cpu[-1] - cpu[0]) / timed,
        }


def cache_of(root: Path) -> Any:
    from pipeline.store.cache import Cache

    return Cache(root)


def items_of(table: Any, work: Any, planned: Any) -> Any:
    """Return the items and what they cost under the plan."""
    from pipeline.runs.planning import sizes_of
    from pipeline.stages.train import Items
    from pipeline.training.prepared import likeness

    sizes = sizes_of(work.task, table.sizes)
    return Items(table, planned.stretches[0].cost(sizes), likeness(sizes))


# ---- research code's kind of loop ----


def write_pickles(folder: Path, root: Path, key: bytes) -> int:
    """Write each complex as such code keeps it; return their bytes."""
    folder.mkdir()
    written = 0
    for batch in loader_of(root, key, range(len(table_of(root, key)))):
        for item in batch.items:
            sides = {role: plain(side) for role, side in item.sides.items()}
            data = {"id": item.id, "number": item.number, "sides": sides, "labels": copies(item.labels)}
            path = folder / f"{item.number}.pkl"
            path.write_bytes(pickle.dumps(data))
            written += path.stat().st_size
    return written


def plain(side: Any) -> dict[str, Any]:
    """Return a partner as a dictionary of tensors that own their memory."""
    fields = {name: copies(getattr(side, name)) for name in ("nodes", "edges")}
    return {**fields, "centre": side.centre.clone(), "x": side.embedding.float(), "encoded": side.encoded.clone()}


def copies(tensors: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def unpickled(path: Path) -> Any:
    """Return a complex, made anew."""
    from pipeline.training.batch import Graph, Side

    with path.open("rb") as file:
        data = pickle.load(file)  # this script has written it
    sides = {
        role: Side(role, one["centre"], one["nodes"], one["edges"], {}, {}, one["x"], one["encoded"])
        for role, one in data["sides"].items()
    }
    return Graph(data["id"], data["number"], sides, {}, data["labels"], np.random.default_rng(data["number"]))


def theirs(folder: Path, way: str) -> dict[str, Any]:
    """Train without a loader; return how fast."""
    import torch

    train = settings()
    task = work_of(train).task
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), train.learning_rate, weight_decay=train.weight_decay)
    paths, clock = sorted(folder.iterdir()), Clock()
    for epoch in range(EPOCHS):
        random.Random(epoch).shuffle(paths)
        losses = []
        for chosen in chunks(paths):
            optimizer.zero_grad()
            losses.append(WAYS[way](task, model, chosen))
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            clock.tick()
    return {**clock.figures(len(paths)), "loss": statistics.mean(losses)}


def chunks(paths: Sequence[Path]) -> Iterator[Sequence[Path]]:
    for start in range(0, len(paths), BATCH):
        yield paths[start : start + BATCH]


def sequential(task: Any, model: Any, paths: Sequence[Path]) -> float:
    """Go forward and backward complex by complex; return the loss."""
    total = 0.0
    for path in paths:
        item = unpickled(path)
        loss = loss_of(task, model, task.collate([item], item.rng)) / len(paths)
        loss.backward()
        total += loss.item()
    return total


def padded(task: Any, model: Any, paths: Sequence[Path]) -> float:
    """Go forward and backward with all at once, as large as the largest; return the loss."""
    items = [unpickled(path) for path in paths]
    loss = loss_of(task, model, filled_up(task.collate(items, items[0].rng)))
    loss.backward()
    return float(loss.item())


WAYS = {"sequential": sequential, "padded": padded}


def loss_of(task: Any, model: Any, batch: Any) -> Any:
    """Return the loss of a batch: the sum of its terms' means."""
    return sum(total / weight for total, weight in task.loss(model, batch).values())


def filled_up(batch: Any) -> Any:
    """Return a batch with so many more rows as padding has, in two further partners that have no labels.

    They stand behind the others and not among them, which costs the same.
    """
    import torch

    count, rows = len(batch.sizes), len(batch.type_N)
    most = [max(column) for column in zip(*batch.sizes, strict=True)]
    edges_S = torch.bincount(batch.partner_N[batch.to_E], minlength=2 * count).view(count, 2)
    more_N = count * sum(most) - rows
    more_E = count * int(edges_S.max(0).values.sum()) - len(batch.to_E)
    more_P = count * most[0] * most[1] - len(batch.receptor_P)
    if not more_N:
        return batch
    own_E, own_P = (torch.full((more,), rows) for more in (more_E, more_P))
    changes = {
        "pos_NA3": torch.cat([batch.pos_NA3, batch.pos_NA3[:1].expand(more_N, -1, -1)]),
        "type_N": longer(batch.type_N, more_N),
        "flags_NF": longer(batch.flags_NF, more_N),
        "embedding_ND": longer(batch.embedding_ND, more_N),
        "partner_N": torch.cat([batch.partner_N, torch.full((more_N,), 2 * count)]),
        "other_S": torch.cat([batch.other_S, torch.tensor([2 * count + 1, 2 * count])]),
        "from_E": torch.cat([batch.from_E, own_E]),
        "to_E": torch.cat([batch.to_E, own_E]),
        "step_E": longer(batch.step_E, more_E),
        "receptor_P": torch.cat([batch.receptor_P, own_P]),
        "ligand_P": torch.cat([batch.ligand_P, own_P]),
        **{name: longer(getattr(batch, name), more_N) for name in ("interface_N", "is_known_N")},
        **{name: longer(getattr(batch, name), more_P) for name in ("contact_P", "is_known_P")},
    }
    return batch._replace(**changes)


def longer(values_N: Any, more: int) -> Any:
    """Return rows with zeros behind them."""
    import torch

    return torch.cat([values_N, values_N.new_zeros(more, *values_N.shape[1:])])


def compare(root: Path, key: bytes, folder: Path) -> float:
    """Return how far apart the losses of some complexes are at most; only the order of sums may differ."""
    import torch

    task = work_of(settings()).task
    torch.manual_seed(SEED)
    model = task.model()
    items = [item for batch in loader_of(root, key, range(BATCH)) for item in batch.clone().items]
    others = [unpickled(folder / f"{int(item.id.removeprefix('item'))}.pkl") for item in items]
    with torch.no_grad():
        mine = float(loss_of(task, model, task.collate(items, items[0].rng)))
        read = task.collate(others, others[0].rng)
        found = [float(loss_of(task, model, one)) for one in (read, filled_up(read))]
    worst: float = max(abs(mine - one) / abs(mine) for one in found)
    assert worst < 1e-5, (mine, found)
    return worst


# ---- processes ----


def in_a_process(given: dict[str, Any], core: int | None = None) -> subprocess.Popen[str]:
    """Begin a measurement in a process of its own, on a core of its own where one is named."""
    command = [sys.executable, "-W", "ignore", __file__, "--part", json.dumps(given)]
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.sched_setaffinity(0, before)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a process measured."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def run_part(given: dict[str, Any]) -> None:
    """Do what `in_a_process` asked for."""
    import torch

    torch.set_num_threads(1)
    if given["kind"] == "theirs":
        found = theirs(Path(given["folder"]), given["way"])
    elif given["kind"] == "plan":
        found = plan(Path(given["root"]), bytes.fromhex(given["key"]), given["ranks"])
    else:
        folder = Path(given["folder"])
        found = ours(Path(given["root"]), bytes.fromhex(given["key"]), given["prepared"], given["part"], folder)
    print(json.dumps(found))


class Bench:
    """The data and the plans; measures each side."""

    def __init__(self, scratch: Path, complexes: int) -> None:
        self.root, self.pickles, self._models = scratch / "cache", scratch / "pickles", scratch / "models"
        self.key = generate(self.root, complexes, complexes)
        self.bytes_per_pickle = write_pickles(self.pickles, self.root, self.key) // complexes
        self.where = {"root": str(self.root), "key": self.key.hex()}
        plans = [in_a_process({"kind": "plan", "ranks": ranks, **self.where}) for ranks in (1, 2)]
        self.prepared = {ranks: ended(one) for ranks, one in enumerate(plans, 1)}
        self._count = 0

    def ours(self, ranks: int = 1, cores: Sequence[int] | None = None) -> dict[str, Any]:
        """Train from the beginning, with so many ranks."""
        self._count += 1
        folder = self._models / str(self._count)
        folder.mkdir(parents=True)
        given = {"kind": "ours", **self.where, "prepared": self.prepared[ranks], "folder": str(folder)}
        parts = [{**given, "part": f"{rank}/{ranks}"} for rank in range(ranks)]
        started = [in_a_process(one, cores[rank] if cores else None) for rank, one in enumerate(parts)]
        found, *_ = [ended(one) for one in started]
        shutil.rmtree(folder)
        if ranks > 1:
            del found["cpu_ms_per_complex"]  # only the first rank's
        return found

    def theirs(self, way: str) -> dict[str, Any]:
        """Train the other way."""
        return ended(in_a_process({"kind": "theirs", "way": way, "folder": str(self.pickles)}))


def measure(scratch: Path, complexes: int, rounds: int) -> dict[str, Any]:
    """Generate and measure everything."""
    load = [os.getloadavg()[0]]
    bench = Bench(scratch, complexes)
    apart = compare(bench.root, bench.key, bench.pickles)
    bench.ours()  # it warms the cache
    sides = [{"ours": bench.ours(), **{way: bench.theirs(way) for way in WAYS}} for _ in range(rounds)]
    load.append(os.getloadavg()[0])
    cores = sorted(os.sched_getaffinity(0))
    several = rounds if len(cores) > 1 else 0
    crews = [{"one_rank": bench.ours(1, cores[:1]), "two_ranks": bench.ours(2, cores[:2])} for _ in range(several)]
    load.append(os.getloadavg()[0])
    return {
        "what": "training the interface model on made complexes with 1,280-wide embeddings, one thread a process",
        "complexes": complexes,
        "batch": BATCH,
        "options": OPTIONS,
        "rounds": rounds,
        "bytes_per_pickle": bench.bytes_per_pickle,
        "losses_apart": apart,
        **medians(sides),
        **medians(crews),
        "ratio": {way: ratios(sides, "ours", way) for way in WAYS},
        "ratio_in_processor_time": {way: cpu_ratio(sides, way) for way in WAYS},
        "two_ranks_to_one": ratios(crews, "two_ranks", "one_rank") if crews else None,
        "reach": REACH,
        "load": [round(one, 1) for one in load],
        "cores": os.cpu_count(),
    }


Round: TypeAlias = "dict[str, dict[str, Any]]"


def medians(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return the medians of what is a number, of each side."""
    found: dict[str, dict[str, float]] = {}
    for side, figures in rounds[0].items() if rounds else ():
        names = [name for name, value in figures.items() if isinstance(value, int | float)]
        found[side] = {name: round(statistics.median(one[side][name] for one in rounds), 4) for name in names}
    return found


def ratios(rounds: Sequence[Round], side: str, other: str) -> dict[str, float]:
    """Return how many times as fast one side is as its neighbour: the median and the lowest."""
    found = [one[side]["complexes_per_s"] / one[other]["complexes_per_s"] for one in rounds]
    return {"median": round(statistics.median(found), 2), "lowest": round(min(found), 2)}


def cpu_ratio(rounds: Sequence[Round], way: str) -> float:
    """Return how many times the processor time the other side takes."""
    found = [one[way]["cpu_ms_per_complex"] / one["ours"]["cpu_ms_per_complex"] for one in rounds]
    return round(float(statistics.median(found)), 2)


def table(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = []
    for side in ("ours", *WAYS, "one_rank", "two_ranks"):
        if side in result:
            one = result[side]
            wait = f"   wait {one['wait_share']:.2%}" if "wait_share" in one else ""
            pace = f"{one['complexes_per_s']:7.1f} complexes/s   step {1e3 * one['step_s']:6.1f} ms"
            cpu = f"   {one['cpu_ms_per_complex']:6.2f} ms of a core each" if "cpu_ms_per_complex" in one else ""
            lines.append(f"{side:12} {pace}{cpu}{wait}")
    for way in WAYS:
        one = result["ratio"][way]
        cpu = result["ratio_in_processor_time"][way]
        lines.append(f"against {way}: {one['median']}x, lowest {one['lowest']}x; in processor time {cpu}x (reach 1.5)")
    if result["two_ranks_to_one"]:
        one = result["two_ranks_to_one"]
        lines.append(f"two ranks, a core each, against one: {one['median']}x, lowest {one['lowest']}x (reach 1.6)")
    lines.append(f"load of the machine {result['load']}, {result['cores']} cores")
    return "\n".join(lines)


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complexes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="train-"))
    try:
        result = measure(scratch, options.complexes, options.rounds)
    finally:
        shutil.rmtree(scratch)
    text = json.dumps(result, indent=2)
    print(text)
    print(table(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
