"""Fields that turn: 3j symbols, harmonics, products and activations against e3nn's, and what they do when turned."""

from __future__ import annotations

import pytest
import torch

from pipeline.tasks.rna.turning_fields import (
    FieldGate,
    FieldLinear,
    FieldProduct,
    Fields,
    LengthActivation,
    coupling,
    field_harmonics,
    field_paths,
    fields_of,
)

FIELDS = Fields(8, 4, 2)
SYMBOLS = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 0, 2), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 0), (2, 2, 2)]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def o3():
    return pytest.importorskip("e3nn.o3", reason="e3nn is not installed: pip install e3nn")


def irreps_of(o3, fields):
    return o3.Irreps([(count, (degree, (-1) ** degree)) for degree, count in enumerate(fields) if count])


@pytest.mark.parametrize("degrees", SYMBOLS)
def test_symbols_are_e3nns(o3, degrees):
    assert torch.allclose(
        torch.from_numpy(coupling(*degrees)), o3.wigner_3j(*degrees, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_harmonics_are_e3nns(o3):
    way_E3 = torch.randn(20, 3, dtype=torch.float64)
    theirs = o3.spherical_harmonics([0, 1, 2], way_E3, normalize=True, normalization="component")
    assert torch.allclose(field_harmonics(way_E3), theirs, atol=1e-12)
    assert torch.isfinite(field_harmonics(torch.zeros(1, 3))).all()


@pytest.mark.parametrize(
    ("enter", "leave"), [(FIELDS, Fields(14, 4, 2)), (Fields(3, 2), Fields(5, 2, 2)), (Fields(2), FIELDS)]
)
def test_a_product_is_e3nns_fully_connected_one(o3, enter, leave):
    theirs = o3.FullyConnectedTensorProduct(
        irreps_of(o3, enter), o3.Irreps("0e+1o+2e"), irreps_of(o3, leave), internal_weights=False, shared_weights=False
    )
    ours = FieldProduct(enter, leave)
    assert ours.weights == theirs.weight_numel
    x_EF, way_E3, weight_EW = torch.randn(7, enter.size), torch.randn(7, 3), torch.randn(7, ours.weights)
    bends = field_harmonics(way_E3)
    assert torch.allclose(ours(x_EF, bends, weight_EW), theirs(x_EF, bends, weight_EW), atol=1e-5)


def test_a_linear_map_is_e3nns(o3):
    for enter in (FIELDS, Fields(8)):
        ours, theirs = FieldLinear(enter, FIELDS), o3.Linear(irreps_of(o3, enter), irreps_of(o3, FIELDS))
        theirs.load_state_dict(ours.state_dict(), strict=False)
        x_NF = torch.randn(5, enter.size)
        assert torch.allclose(ours(x_NF), theirs(x_NF), atol=1e-6)


def test_activations_are_e3nns(o3):
    made = pytest.importorskip("e3nn.nn")
    theirs = made.Gate(
        o3.Irreps("8x0e"),
        [torch.nn.functional.silu],
        o3.Irreps("4x0e+2x0e"),
        [torch.sigmoid] * 2,
        o3.Irreps("4x1o+2x2e"),
    )
    ours = FieldGate(FIELDS)
    x_NF = torch.randn(5, ours.enter.size)
    assert torch.allclose(ours(x_NF), theirs(x_NF), atol=1e-5)
    by_length = made.NormActivation(irreps_of(o3, FIELDS), torch.nn.functional.silu)
    x_NF = torch.randn(5, FIELDS.size)
    assert torch.allclose(LengthActivation(FIELDS)(x_NF), by_length(x_NF.clone()), atol=1e-6)


def test_paths_keep_parity_and_every_one_has_weights():
    paths = field_paths(FIELDS, FIELDS)
    assert len(paths) == 11
    assert all((path.source + path.harmonic + path.target) % 2 == 0 for path in paths)
    assert sum(path.weights for path in paths) == 216  # of FACTS.md: without a gate


@pytest.mark.parametrize(
    ("text", "fields"), [("32x0e+16x1o+8x2e", (32, 16, 8)), ("8x0e + 2x2e", (8, 0, 2)), ("4x1o+3x0e", (3, 4, 0))]
)
def test_fields_are_read_from_a_text(text, fields):
    assert fields_of(text) == fields
