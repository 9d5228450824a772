"""Model families that the planner's authors had not in mind, as people write them."""

from __future__ import annotations

from tests.zoo.strangers import architectures, derivatives, ways

FAMILIES = {**architectures.FAMILIES, **ways.FAMILIES, **derivatives.FAMILIES}
LEAST, ROWS = {"items": 64}, {"items": 1024}  # of the smallest batch, and of one that is planned
