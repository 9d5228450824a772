"""Model families with which the planner is proved against real steps."""

from __future__ import annotations

from tests.zoo import contrastive, esm2, plain, shipped, transformer
from tests.zoo.member import Member, batch_sizes

FAMILIES = (plain, transformer, esm2, contrastive, shipped)
ZOO = {member.name: member for family in FAMILIES for member in family.MEMBERS}

__all__ = ["ZOO", "Member", "batch_sizes"]
