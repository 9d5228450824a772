"""Model families of the five guides and their kin, with which the planner is proved against real steps."""

from __future__ import annotations

from tests.zoo import (
    autograd,
    contrastive,
    convolution,
    docking,
    equivariant,
    esm2,
    gnn,
    language,
    mlp,
    peptide,
    rendering,
    spectra,
    transformer,
)
from tests.zoo.member import Member, batch_sizes

FAMILIES = (
    mlp,
    transformer,
    language,
    esm2,
    peptide,
    rendering,
    gnn,
    docking,
    equivariant,
    contrastive,
    autograd,
    convolution,
    spectra,
)
ZOO = {member.name: member for family in FAMILIES for member in family.MEMBERS}

__all__ = ["ZOO", "Member", "batch_sizes"]
