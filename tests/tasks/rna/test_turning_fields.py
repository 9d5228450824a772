"""Fields that turn: how they are read from a text, and the paths between them."""

from __future__ import annotations

import pytest

from pipeline.tasks.irreps import product_paths
from pipeline.tasks.rna.turning_fields import Fields, fields_of

FIELDS = Fields(8, 4, 2)
pytestmark = pytest.mark.usefixtures("one_thread")


def test_paths_keep_parity_and_every_one_has_weights():
    paths = product_paths(FIELDS.irreps, FIELDS.irreps)
    assert len(paths) == 11
    assert all(sum(path.degrees) % 2 == 0 for path in paths)
    assert sum(path.weights for path in paths) == 216  # of FACTS.md: without a gate


@pytest.mark.parametrize(
    ("text", "fields"), [("32x0e+16x1o+8x2e", (32, 16, 8)), ("8x0e + 2x2e", (8, 0, 2)), ("4x1o+3x0e", (3, 4, 0))]
)
def test_fields_are_read_from_a_text(text, fields):
    assert fields_of(text) == fields
