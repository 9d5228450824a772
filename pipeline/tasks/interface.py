"""The network of the interface task: messages within each partner, then every pair of residues of the two.

Its input is distances and angles within each partner, not their relative position. So rotating, moving or mirroring a
partner changes no number.

Shapes: N residues of all partners, P pairs, D features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.protocol import ITEMS
from pipeline.tasks.partner_graphs import (
    PartnerBatch,
    PartnerEncoder,
    even_shares,
    example_partners,
    joined_partners,
    partners_of,
    size_of,
)
from pipeline.tasks.ranking_scores import Ranking, logits, precision_at
from pipeline.tasks.task_parts import at_least, at_least_single, dropout_of, known_figures, where_known
from pipeline.training.items.item_source import LIGAND, RECEPTOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors, PartnerTensors

USUAL_INTERFACE, USUAL_CONTACT = -1.5, -5.5  # initial biases: one residue in 6, one pair in 250


class Head(nn.Module):
    """Computes a logit from features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x_ND: Tensor) -> Tensor:
        logit_N: Tensor = self.outer(functional.silu(self.inner(x_ND))).squeeze(-1)
        return logit_N


class PairLayer(nn.Module):
    """A residual layer over the features of a pair of residues."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_PD: Tensor) -> Tensor:
        changed_PD: Tensor = x_PD + self.outer(functional.silu(self.inner(x_PD)))
        return changed_PD


class InterfaceNetwork(PartnerEncoder):
    """Computes a logit for each residue and for each pair of residues from the graphs of two partners."""

    def __init__(self, task: Interface) -> None:
        super().__init__(task.embedding_dim, task.width, task.layers, task.dropout)
        width, pair_width = task.width, task.pair_width
        self.norm = nn.LayerNorm(width)
        self.residue = Head(width)
        self.receptor, self.ligand = nn.Linear(width, pair_width), nn.Linear(width, pair_width)
        self.pair_layers = nn.ModuleList(PairLayer(pair_width) for _ in range(task.pair_layers))
        self.pair = nn.Linear(pair_width, 1)
        nn.init.constant_(self.residue.outer.bias, USUAL_INTERFACE)
        nn.init.constant_(self.pair.bias, USUAL_CONTACT)

    def forward(self, batch: InterfaceBatch) -> tuple[Tensor, Tensor]:
        partners = batch.partners
        x_ND = self.norm(self.encode(partners))
        receptor_PD = self.receptor(x_ND).index_select(0, partners.receptor_P)
        x_PD = receptor_PD * self.ligand(x_ND).index_select(0, partners.ligand_P)
        for layer in self.pair_layers:
            x_PD = layer(x_PD)
        return self.residue(x_ND), self.pair(x_PD).squeeze(-1)


TERMS = (INTERFACE, CONTACTS) = ("interface", "contacts")
LABEL = "label"  # of an output, behind a dot; 1 yes, 0 no, -1 not known; of no size where an item has no labels
NOT_KNOWN = -1
LARGEST_PART = 5  # L / 5 pairs are looked at, where L counts the residues of both partners
LEAST = {
    **dict.fromkeys(("width", "layers", "pair_width"), 1),
    "embedding_dim": 0,
    "pair_layers": 0,
    "contact_weight": 0,
}


class Labels(NamedTuple):
    """The labels of an item's interface, or of all items of a batch."""

    interface_N: Tensor  # receptor, then ligand
    is_known_N: Tensor
    contact_P: Tensor
    is_known_P: Tensor


class InterfaceBatch(NamedTuple):
    """Some items' partners, and the labels of their interfaces."""

    partners: PartnerBatch
    labels: Labels
    shapes: tuple[tuple[int, int], ...]  # of each item's pairs, the same but in an example
    has_labels: tuple[bool, ...]  # of each item
    known: tuple[float, float]  # residues, pairs


@dataclass(frozen=True)
class Interface:
    """The task: predict interface residues and contacts from each partner's own structure and sequence."""

    embedding_dim: int = 1280  # of ESM-2 650M; 0: without embeddings
    width: int = 128
    layers: int = 4
    pair_width: int = 64
    pair_layers: int = 2
    dropout: float = 0.0
    contact_weight: float = 1.0  # weight of a pair that touches, relative to one that does not

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        dropout_of(self)

    def model(self) -> nn.Module:
        return InterfaceNetwork(self)

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {name: item[name] for name in ("nodes", "edges", "pairs")}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> InterfaceBatch:  # noqa: ARG002 - the protocol has it
        sides = [partners_of(item) for item in items]
        partners = joined_partners(sides, self.embedding_dim)
        labels = [_labels(item, pair, size) for item, pair, size in zip(items, sides, partners.sizes, strict=True)]
        known = Labels(*(torch.cat(values) for values in zip(*labels, strict=True)))
        return InterfaceBatch(
            partners=partners,
            labels=known,
            shapes=partners.sizes,
            has_labels=tuple(bool(label.is_known_N.any()) for label in labels),
            known=(float(known.is_known_N.count_nonzero()), float(known.is_known_P.count_nonzero())),
        )

    def loss(self, model: nn.Module, batch: InterfaceBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the cross entropy of residues and of pairs, and how many are known."""
        residue_N, pair_P = model(batch)
        labels = batch.labels
        of_residues = _entropy(residue_N, labels.interface_N, labels.is_known_N, 1.0)
        of_pairs = _entropy(pair_P, labels.contact_P, labels.is_known_P, self.contact_weight)
        return dict(zip(TERMS, zip((of_residues, of_pairs), batch.known, strict=True), strict=True))

    def weights(self, batch: InterfaceBatch) -> dict[str, float]:
        """Return how many residues and pairs are known."""
        return dict(zip(TERMS, batch.known, strict=True))

    def outputs(self, model: nn.Module, batch: InterfaceBatch) -> dict[str, list[Tensor]]:
        """Return probabilities and labels of each item: of both partners' residues [R], [L], and of pairs [R, L].

        And numbers to sort by: how many contacts are expected, and the probability of the likeliest.
        """
        residue_N, pair_P = (torch.sigmoid(at_least_single(logits)) for logits in model(batch))
        known = batch.labels
        label_N = torch.where(known.is_known_N, known.interface_N.to(torch.int8), NOT_KNOWN)
        label_P = torch.where(known.is_known_P, known.contact_P.to(torch.int8), NOT_KNOWN)
        labels = {
            f"{name}_{LABEL}": where_known(values, batch.has_labels)
            for name, values in _split(label_N, label_P, batch).items()
        }
        predicted = _split(residue_N, pair_P, batch)
        expected = [contact_RL.sum() for contact_RL in predicted[CONTACTS]]
        likeliest = [
            torch.cat([contact_RL.flatten(), contact_RL.new_zeros(1)]).max() for contact_RL in predicted[CONTACTS]
        ]
        return predicted | labels | {"expected_contacts": expected, "likeliest_contact": likeliest}

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of a split; those that its labels do not define are left out.

        Contact precision at L/5: of an item's L/5 pairs with the highest scores (L residues of both partners together,
        at least one pair), the share that touch; the mean over the items that have labels.
        """
        residues, pairs, precisions = Ranking(), Ranking(), list[float]()
        for role in (RECEPTOR, LIGAND):
            for _, chances, labels in _labelled(outputs, f"{role}_{INTERFACE}"):
                residues.add(logits(chances), labels)
        for shape, chances, labels in _labelled(outputs, CONTACTS):
            pairs.add(logits(chances), labels)
            precisions.append(precision_at(chances, labels, sum(shape) // LARGEST_PART))
        figures = {
            "interface_auroc": residues.auroc(),
            "interface_auprc": residues.auprc(),
            "contact_auroc": pairs.auroc(),
            "contact_auprc": pairs.auprc(),
            "contact_precision_l5": sum(precisions) / len(precisions) if precisions else math.nan,
        }
        return known_figures(figures)

    def example(self, sizes: Sizes) -> InterfaceBatch:
        """Return a batch of these sizes; how they are spread over its items makes no difference."""
        nodes, pairs, items = (sizes[name] for name in ("nodes", "pairs", ITEMS))
        return InterfaceBatch(
            partners=example_partners(sizes, self.embedding_dim),
            labels=Labels(
                interface_N=torch.zeros(nodes, dtype=torch.bool),
                is_known_N=torch.ones(nodes, dtype=torch.bool),
                contact_P=torch.zeros(pairs, dtype=torch.bool),
                is_known_P=torch.ones(pairs, dtype=torch.bool),
            ),
            shapes=tuple((share, 1) for share in even_shares(pairs, items)),
            has_labels=(True,) * items,
            known=(float(nodes), float(pairs)),
        )


def _labels(item: ItemTensors, sides: tuple[PartnerTensors, PartnerTensors | None], size: tuple[int, int]) -> Labels:
    """Return the labels of an item; one without contacts counts as unlabelled, as every complex has some."""
    receptor, ligand = size
    contact_C2 = item.labels.get("contact_pairs")
    contact_RL = torch.zeros(receptor, ligand, dtype=torch.bool)
    if contact_C2 is None or not len(contact_C2):
        nothing_N = torch.zeros(receptor + ligand, dtype=torch.bool)
        return Labels(nothing_N, nothing_N, contact_RL.flatten(), contact_RL.flatten())
    contact_RL[contact_C2[:, 0].long(), contact_C2[:, 1].long()] = True
    known_R, known_L = (_are_known(side) for side in sides)
    return Labels(
        interface_N=torch.cat([contact_RL.any(1), contact_RL.any(0)]),
        is_known_N=torch.cat([known_R, known_L]),
        contact_P=contact_RL.flatten(),
        is_known_P=(known_R.unsqueeze(1) & known_L).flatten(),
    )


def _are_known(side: PartnerTensors | None) -> Tensor:
    """Return which residues have labels: on unbound input, those that the bound structure has too."""
    assert side is not None, "contacts need two partners"
    is_known_N = side.nodes.get("labelled")
    # In a batch with unbound items, `labelled` is False for all residues of the others.
    return is_known_N if is_known_N is not None and is_known_N.any() else torch.ones(size_of(side), dtype=torch.bool)


def _entropy(logit_N: Tensor, label_N: Tensor, is_known_N: Tensor, yes_weight: float) -> Tensor:
    """Return the sum of the cross entropy over the known labels."""
    logit_N = at_least_single(logit_N)
    label_N = label_N.to(logit_N.dtype)
    weight_N = is_known_N.to(logit_N.dtype)
    if yes_weight != 1.0:
        weight_N = weight_N * (1 + (yes_weight - 1) * label_N)
    return functional.binary_cross_entropy_with_logits(logit_N, label_N, weight_N, reduction="sum")


def _split(of_N: Tensor, of_P: Tensor, batch: InterfaceBatch) -> dict[str, list[Tensor]]:
    """Split values of residues and of pairs into those of each item."""
    of_partners = torch.split_with_sizes(of_N, [count for pair in batch.partners.sizes for count in pair])
    of_items = torch.split_with_sizes(of_P, [rows * columns for rows, columns in batch.shapes])
    return {
        f"{RECEPTOR}_{INTERFACE}": list(of_partners[::2]),
        f"{LIGAND}_{INTERFACE}": list(of_partners[1::2]),
        CONTACTS: [pair_P.view(shape) for pair_P, shape in zip(of_items, batch.shapes, strict=True)],
    }


def _labelled(outputs: Mapping[str, Sequence[Any]], name: str) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Yield for each item that has labels the shape of an output, its values where they are known, and these labels."""
    for values, labels in zip(outputs[name], outputs[f"{name}_{LABEL}"], strict=True):
        if labels.size:
            is_known = labels != NOT_KNOWN
            yield values.shape, *((values, labels) if is_known.all() else (values[is_known], labels[is_known]))
