"""The true pose: the CA atoms of both partners as the input has them, placed as they are in the bound complex.

Shapes: R residues of the receptor, L of the ligand, N of either, M of them that are in the bound structure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.tasks.docking.pose_sampling import nearest_turn
from pipeline.tasks.partner_graphs import CA

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.training.items.batch import PartnerTensors

FEWEST = 3  # residues that say how a partner is turned


def bound_frame(receptor: PartnerTensors, ligand: PartnerTensors) -> tuple[Tensor, Tensor]:
    """Return the CA atoms of the receptor [R, 3] and of the ligand [L, 3] at the true pose, in float64.

    Partners of a bound input stand in one frame already: that of their file. Unbound ones are each superposed onto the
    bound structure by the residues that are in it, in the frame of `labels["bound_centre"]`.
    """
    sides = receptor, ligand
    receptor_R3, ligand_L3 = (_onto_bound(side) if is_unbound(*sides) else _in_file(side) for side in sides)
    return receptor_R3, ligand_L3


def is_unbound(*sides: PartnerTensors) -> bool:
    """Tell whether partners have places in a bound structure; beside such items, bound ones have fields without any."""
    return any(bool(side.nodes["labelled"].any()) for side in sides if "labelled" in side.nodes)


def _in_file(side: PartnerTensors) -> Tensor:
    pos_N3: Tensor = side.nodes["pos"][:, CA].double() + side.centre.double()
    return pos_N3


def _onto_bound(side: PartnerTensors) -> Tensor:
    """Return a partner's CA atoms where its residues that are in the bound structure are nearest to their places."""
    known_N = side.nodes["labelled"]
    known = int(known_N.sum())
    if known < FEWEST:
        problem = f"{known} residues of the {side.role} are in the bound structure: {FEWEST} say how it is turned"
        raise ConfigError(problem, where="data", remedy="leave it out, or   --set data.state=bound")
    pos_N3, bound_M3 = side.nodes["pos"][:, CA].double(), side.nodes["bound"][known_N].double()
    from_3, to_3 = pos_N3[known_N].mean(0), bound_M3.mean(0)
    turn_33 = nearest_turn((pos_N3[known_N] - from_3).unsqueeze(0), bound_M3 - to_3)[0]
    return (pos_N3 - from_3) @ turn_33 + to_3
