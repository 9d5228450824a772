"""GPUs by name: which is meant, what memory is left of it, how fast it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.memory.hardware.gpus import Device, device, known_names, sizes_gib

GIB = 1 << 30


NAMES = {
    "a100-80gb-pcie": ("a100-80gb", "A100_80", "NVIDIA A100 80GB PCIe"),
    "a100-80gb-sxm": ("NVIDIA A100-SXM4-80GB",),
    "a100-40gb": ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB"),
    "h100-80gb-sxm": ("NVIDIA H100 80GB HBM3",),
    "h100-80gb-pcie": ("NVIDIA H100 PCIe",),
    "h100-94gb-nvl": ("NVIDIA H100 NVL", "h100-94"),
    "h200-141gb-sxm": ("NVIDIA H200",),
    "h200-141gb-nvl": ("NVIDIA H200 NVL", "h200"),
    "b200-180gb": ("NVIDIA B200",),
    "v100-32gb-sxm": ("Tesla V100-SXM2-32GB",),
    "rtx-4090": ("rtx4090", "RTX 4090", "geforce_rtx_4090", "4090", "NVIDIA GeForce RTX 4090"),
    "rtx-2080-ti": ("2080ti",),
    "rtx-a6000": ("NVIDIA RTX A6000",),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation",),
    "rtx-6000": ("Quadro RTX 6000",),
    "a10g": ("A10G",),
    "a10": ("NVIDIA A10",),
    "l40s": ("L40S", "NVIDIA L40S"),
    "l4": ("NVIDIA L4",),
    "t4": ("Tesla T4",),
}


def test_a_name_is_known_however_it_is_written() -> None:
    meant = {said: device(said).name for names in NAMES.values() for said in names}
    assert meant == {said: name for name, names in NAMES.items() for said in names}


def test_every_known_name_means_itself_and_adds_up() -> None:
    for name in known_names():
        found = device(name)
        assert found.name == name
        assert found.budget_bytes(1) + found.context_bytes + found.reserve_bytes == found.usable_bytes, name
        assert found.usable_bytes >= 9 * GIB, name
        assert 0.8 < found.budget_bytes(8) / found.usable_bytes < 0.99, name
        size = sizes_gib(name)[0]
        assert 0 <= size - found.usable_bytes / GIB + 0.98 < 1.5, name


@pytest.mark.parametrize(
    ("said", "least", "others"),
    [
        ("a100", "a100-40gb", "a100-80gb-sxm"),
        ("v100", "v100-16gb-pcie", "v100-32gb-sxm"),
        ("h100", "h100-80gb-pcie", "h100-94gb-nvl"),
        ("v100-32gb", "v100-32gb-pcie", "v100-32gb-sxm"),
    ],
)
def test_an_ambiguous_name_means_the_least_of_them_and_says_so(said: str, least: str, others: str) -> None:
    found = device(said)
    assert found.name == least
    (note,) = found.notes
    assert others in note
    assert device("L40S").notes == ()


@pytest.mark.parametrize(
    ("said", "usable_gib"),
    [("1g.10gb", 9), ("nvidia_a100_3g.20gb", 18), ("h200.35gb", 32), ("H100-1g.20gb", 18), ("a30_1g.6gb", 5)],
)
def test_a_slice_has_its_own_memory_and_a_share_of_the_rates(said: str, usable_gib: int) -> None:
    found = device(said)
    whole = device("a30" if "6gb" in said else "a100-40gb")
    assert found.usable_bytes == usable_gib * GIB
    assert 0 < found.half_flops < whole.half_flops


@pytest.mark.parametrize("said", ["24GiB", "24g", "24 GB", "24G", "24576MiB"])
def test_a_plain_size_is_a_gpu_too(said: str) -> None:
    found = device(said)
    assert found.usable_bytes == 24 * GIB
    assert found.reserve_bytes == 24 * GIB // 16
    assert len(found.notes) == 2


def test_what_is_planned_for_a_size_fits_real_cards_of_that_size() -> None:
    for said, names in {
        "24GiB": ("rtx-3090", "rtx-4090", "a30"),
        "40GiB": ("a100-40gb",),
        "80GiB": ("h100", "a100-80gb"),
    }.items():
        for name in names:
            assert device(said).budget_bytes(2) < device(name).budget_bytes(2), (said, name)
            assert device(said).half_flops <= device(name).half_flops, (said, name)


@pytest.mark.parametrize(
    ("said", "near"), [("rtx4091", "rtx-4090"), ("a1000", "a100"), ("gh200", "h200"), ("v10O", "v100")]
)
def test_an_unknown_name_is_refused_with_its_nearest_and_the_way_out(said: str, near: str) -> None:
    with pytest.raises(ConfigError) as refused:
        device(said)
    assert near in refused.value.what
    assert refused.value.where == "--gpu"
    assert "24GiB" in refused.value.remedy
    assert refused.value.exit_code == 2


def test_several_ranks_pay_for_their_communicator() -> None:
    card = device("a100-40gb")
    assert card.budget_bytes(1) - card.budget_bytes(2) == card.budget_bytes(1) - card.budget_bytes(64) == 700 * 10**6


def test_who_computes_in_half_precision() -> None:
    names = ("v100-16gb", "t4", "a10", "h100", "rtx-4090", "gtx-1080-ti", "k80")
    assert [name for name in names if device(name).has_bf16] == ["a10", "h100", "rtx-4090"]
    assert [name for name in names if not device(name).has_fp16] == ["gtx-1080-ti", "k80"]


def test_cublas_takes_more_on_hopper_alone() -> None:
    """The size of one workspace was seen as a block of 8,519,680 bytes: discuss.pytorch.org/t/178671."""
    assert device("a100").workspace_bytes == 2 * (8_519_680 + (1 << 20))
    assert device("h200").workspace_bytes == device("b200").workspace_bytes == 2 * (33 << 20)


@given(st.text(max_size=30))
def test_whatever_is_said_is_a_gpu_or_refused_with_words(said: str) -> None:
    try:
        assert isinstance(device(said), Device)
    except ConfigError as refused:
        assert refused.remedy  # noqa: PT017 -- which of the two it is does not matter


@pytest.mark.parametrize("name", ["", "gpu", "24", "-1GiB", "a10o", "t4g", "3090ti", "a100x4", "9999999999TiB", "0GiB"])
def test_what_is_nearly_a_name_or_a_size_is_not_taken_for_one(name: str) -> None:
    with pytest.raises(ConfigError):
        device(name)
