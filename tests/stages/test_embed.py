"""Stage embed: what it stores, what it does not do again, and when it publishes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from pipeline.encoder import esm2, parity
from pipeline.encoder.embed_texts import EmbeddingVerifier, EmbedShelves, Texts, embed_texts
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, EmbeddingRecipe, Variant
from pipeline.encoder.engine.encoder_source import EsmSource
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.esm_checkpoint import digest_weights, load_esm_checkpoint
from pipeline.encoder.parity import ParityVerdict, Reference
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import CacheFull, JobFailed
from pipeline.records import Reason, TaskContext
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.store import StoreWriter, WholeRecords
from tests.encoder.sequences import natural

# More than any process of tests holds: what it has taken by then is not what is asked here.
SETTINGS = EngineSettings(policy="divisor", cap=4, budget=512, device="cpu", mem_bytes=64 << 30)
TEXTS = natural(13, shortest=1, longest=60)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "esm2_tiny.pt"
    write_random_checkpoint(path, layers=2, dim=16, heads=2)
    return path


@pytest.fixture(scope="module")
def recipe(weights: Path) -> EmbeddingRecipe:
    return EmbeddingRecipe(
        digest_weights(load_esm_checkpoint(weights)), layer=2, context="chain", precision="fp32", storage="fp32"
    )


@pytest.fixture
def shelves(tmp_path: Path) -> EmbedShelves:
    return open_shelves(tmp_path)


def open_shelves(folder: Path) -> EmbedShelves:
    cache = CacheFolder(folder / "cache")
    return EmbedShelves(*(cache.kind(kind) for kind in ("embed", "weights", "parity")), shard_bytes=1 << 20)


def texts_of(sequences: Sequence[str]) -> Texts:
    return Texts(np.array([len(text) for text in sequences]), lambda wanted: [sequences[at] for at in wanted])


def at(weights: Path) -> Callable[[], EsmSource]:
    return lambda: EsmSource.at(weights)


def tell_to(refused: list[tuple[str, Reason, str]]) -> TaskContext:
    return TaskContext(lambda *what: refused.append(what))


def run(
    weights: Path,
    recipe: EmbeddingRecipe,
    shelves: EmbedShelves,
    sequences: Sequence[str] = TEXTS,
    settings: EngineSettings = SETTINGS,
) -> list[Reason | None]:
    return list(embed_texts(texts_of(sequences), at(weights), recipe, settings, shelves, tell_to([])))


def looked_up(recipe: EmbeddingRecipe, shelves: EmbedShelves) -> list[Variant | None]:
    return list(EmbeddingVerifier(recipe, WholeRecords(shelves.embeddings)).look_up(TEXTS).values())


def rows_of(
    text: str, recipe: EmbeddingRecipe, shelves: EmbedShelves, variant: Variant | None = None
) -> NDArray[np.float32]:
    return shelves.embeddings.get(recipe.key(text, variant or recipe.wanted(len(text)))).arrays["rows"]


def test_what_is_stored_is_what_fair_esm_computes(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves
) -> None:
    assert run(weights, recipe, shelves) == [None] * len(TEXTS)
    wanted = Reference(load_esm_checkpoint(weights), 2, torch.device("cpu"))(TEXTS)
    for text, rows in zip(TEXTS, wanted, strict=True):
        np.testing.assert_allclose(rows_of(text, recipe, shelves), rows, atol=1e-5)


def test_a_second_run_computes_nothing(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(weights, recipe, shelves)
    monkeypatch.setattr("pipeline.encoder.engine.encoder_source.load_esm_checkpoint", forbidden)
    assert run(weights, recipe, open_shelves(tmp_path)) == [None] * len(TEXTS)


@pytest.mark.nightly
def test_batches_do_not_change_a_bit(weights: Path, recipe: EmbeddingRecipe, tmp_path: Path) -> None:
    stored = []
    for number, settings in enumerate(
        (SETTINGS, replace(SETTINGS, cap=1), replace(SETTINGS, policy="tokens", budget=200, cap="auto"))
    ):
        shelves = open_shelves(tmp_path / str(number))
        run(weights, recipe, shelves, settings=settings)
        stored.append([rows_of(text, recipe, shelves).tobytes() for text in TEXTS])
    assert stored[0] == stored[1] == stored[2]


@pytest.mark.nightly
def test_bfloat16_is_stored_as_other_readers_know_it(weights: Path, recipe: EmbeddingRecipe, tmp_path: Path) -> None:
    full, half = open_shelves(tmp_path / "full"), open_shelves(tmp_path / "half")
    run(weights, recipe, full)
    run(weights, replace(recipe, storage="bf16"), half)
    (shard,) = (tmp_path / "half/cache/embed/shards").iterdir()
    key = replace(recipe, storage="bf16").key(TEXTS[3], Variant("fp32"))
    with safe_open(shard, "pt") as file:
        rows = file.get_tensor(f"{key.hex()}/rows")
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, torch.from_numpy(rows_of(TEXTS[3], recipe, full).copy()).bfloat16())


BELOW = {  # precision asked for → cosines that are found, and in what all is computed then, if at all
    "fp32": ({"fp32": 0.9}, None),
    "bf16": ({"bf16": 0.9, "fp32": 1.0}, "fp32"),
    "bf16, and fp32 fails as well": ({"bf16": 0.9, "fp32": 0.5}, None),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "bf16" else pytest.mark.nightly) for case in BELOW]
)
def test_an_encoder_that_misses_the_reference_is_done_in_full_or_publishes_nothing(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    cosines, computed = BELOW[case]
    asked = replace(recipe, precision=case[:4], storage=case[:4])
    with monkeypatch.context() as patch:
        verdict = lambda _found, _wanted, precision, **_: ParityVerdict(cosines[precision], 9, 0.999)  # noqa: E731
        patch.setattr(parity, "judge_rows", verdict)
        if computed:
            assert run(weights, asked, shelves) == [None] * len(TEXTS)
            assert looked_up(asked, shelves) == [Variant(computed)] * len(TEXTS)
            return
        with pytest.raises(JobFailed):
            run(weights, asked, shelves)
    assert shelves.embeddings.stat().records == 0
    assert run(weights, asked, shelves) == [None] * len(TEXTS)  # a failure is not remembered


def test_a_processor_without_bf16_products_computes_in_fp32_or_says_what_to_do(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(esm2, "bf16_products_here", lambda: False)
    products = replace(recipe, precision=BF16_PRODUCTS)
    with pytest.raises(JobFailed) as refusal:
        run(weights, replace(products, half_fallback=False), shelves)
    assert "embed.precision=fp32" in str(refusal.value.remedy)
    assert run(weights, products, shelves) == [None] * len(TEXTS)
    assert set(looked_up(products, shelves)) == {Variant("fp32")}


@pytest.mark.nightly
def test_the_verdict_is_remembered_for_the_same_machine(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(weights, recipe, shelves, TEXTS[:3])
    monkeypatch.setattr(parity, "check_parity", forbidden)
    assert run(weights, recipe, shelves) == [None] * len(TEXTS)
    with pytest.raises(AssertionError, match="was done again"):  # but not for another precision
        run(weights, replace(recipe, precision="bf16"), shelves, natural(2, seed=5))


def test_what_cannot_be_embedded_is_told_by_its_key(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves
) -> None:
    refused: list[tuple[str, Reason, str]] = []
    strict = replace(recipe, long="error", length=64)
    sequences = [*TEXTS[:2], "M" * 65]
    reasons = list(embed_texts(texts_of(sequences), at(weights), strict, SETTINGS, shelves, tell_to(refused)))
    assert sorted(reasons, key=str) == sorted([None, None, Reason.SEQUENCE_TOO_LONG], key=str)
    ((key, reason, _),) = refused
    assert (key, reason) == (strict.key("M" * 65, strict.wanted(65)).hex(), Reason.SEQUENCE_TOO_LONG)


def forbidden(*_: object, **__: object) -> Iterator[None]:
    raise AssertionError("was done again")


@pytest.mark.nightly
def test_a_record_without_the_mark_is_not_served_where_it_is_kept_and_the_gate_is_asked_again(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves
) -> None:
    marked = replace(recipe, cls=True)
    run(weights, recipe, shelves)
    assert looked_up(marked, shelves) == [None] * len(TEXTS)
    assert run(weights, marked, shelves) == [None] * len(TEXTS)
    assert shelves.parity.stat().records == 2
    wanted = Reference(load_esm_checkpoint(weights), 2, torch.device("cpu"))(TEXTS, cls=True)
    for text, rows_LD in zip(TEXTS, wanted, strict=True):
        record = shelves.embeddings.get(marked.key(text, Variant("fp32")))
        np.testing.assert_allclose(record.arrays["cls"], rows_LD[0], atol=1e-5)
        np.testing.assert_array_equal(record.arrays["rows"], rows_of(text, recipe, shelves))


def test_weights_that_are_replaced_while_a_task_begins_are_not_taken_for_those_of_the_keys(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves, tmp_path: Path
) -> None:
    other = tmp_path / "esm2_other.pt"
    write_random_checkpoint(other, layers=2, dim=16, heads=2, seed=7)
    with pytest.raises(JobFailed):
        run(other, recipe, shelves)
    assert shelves.embeddings.stat().records == 0


def test_a_disk_that_fills_while_a_task_is_ended_is_heard(
    weights: Path, recipe: EmbeddingRecipe, shelves: EmbedShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = embed_texts(texts_of(natural(100)), at(weights), recipe, SETTINGS, shelves, tell_to([]))
    next(outcomes)

    def full(*_: object, **__: object) -> None:
        raise CacheFull("no space left")

    monkeypatch.setattr(StoreWriter, "put", full)
    monkeypatch.setattr(StoreWriter, "flush", full)
    with pytest.raises(CacheFull):
        outcomes.close()
