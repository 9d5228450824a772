"""The other side: research code's kind of loop over pickles, complex by complex or padded; and whether both agree."""

from __future__ import annotations

import pickle
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train_parts.ours import BATCH, EPOCHS, SEED, Clock, settings, table_of, work_of
from benchmarks.training.loader import loader_of


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
    from pipeline.training.items.batch import ItemTensors, PartnerTensors

    with path.open("rb") as file:
        data = pickle.load(file)  # this script has written it
    sides = {
        role: PartnerTensors(role, one["centre"], one["nodes"], one["edges"], {}, {}, one["x"], one["encoded"])
        for role, one in data["sides"].items()
    }
    return ItemTensors(data["id"], data["number"], sides, {}, data["labels"], np.random.default_rng(data["number"]))


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

    sides, labels = batch.partners, batch.labels
    count, rows = len(sides.sizes), len(sides.type_N)
    most = [max(column) for column in zip(*sides.sizes, strict=True)]
    edges_S = torch.bincount(sides.partner_N[sides.to_E], minlength=2 * count).view(count, 2)
    more_N = count * sum(most) - rows
    more_E = count * int(edges_S.max(0).values.sum()) - len(sides.to_E)
    more_P = count * most[0] * most[1] - len(sides.receptor_P)
    if not more_N:
        return batch
    own_E, own_P = (torch.full((more,), rows) for more in (more_E, more_P))
    changes = {
        "pos_NA3": torch.cat([sides.pos_NA3, sides.pos_NA3[:1].expand(more_N, -1, -1)]),
        "type_N": longer(sides.type_N, more_N),
        "flags_NF": longer(sides.flags_NF, more_N),
        "embedding_ND": longer(sides.embedding_ND, more_N),
        "partner_N": torch.cat([sides.partner_N, torch.full((more_N,), 2 * count)]),
        "other_S": torch.cat([sides.other_S, torch.tensor([2 * count + 1, 2 * count])]),
        "from_E": torch.cat([sides.from_E, own_E]),
        "to_E": torch.cat([sides.to_E, own_E]),
        "step_E": longer(sides.step_E, more_E),
        "receptor_P": torch.cat([sides.receptor_P, own_P]),
        "ligand_P": torch.cat([sides.ligand_P, own_P]),
    }
    known = {name: longer(getattr(labels, name), more_N) for name in ("interface_N", "is_known_N")}
    known |= {name: longer(getattr(labels, name), more_P) for name in ("contact_P", "is_known_P")}
    return batch._replace(partners=sides._replace(**changes), labels=labels._replace(**known))


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
