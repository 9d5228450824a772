"""Spectra with candidates to be compared with: which they are, and that each step draws one of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.readers import scaffolds
from pipeline.readers.scaffolds import scaffold_split
from pipeline.readers.spectra import Spectra
from pipeline.readers.spectrum_triplets import SpectrumPairs, SpectrumTriplets
from pipeline.records import Entry, Rejection
from pipeline.tasks.spectra_finetune import SpectraContrast, SpectraFinetune
from pipeline.training.items.batch import ItemTensors
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.readers.compared import assert_same
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of

LETTERS = "ABCD"
SMALL = {"layers": 2, "heads": 2, "d_fourier": 12, "d_peak": 4, "fourier_width": 8, "finest": 0.01}


def library(path: Path, each: int = 3) -> Path:
    """Spectra of four molecules: A and B of nearly one mass, C far away, D alone; the last has no molecule."""
    masses = {"A": 200.0, "B": 200.03, "C": 300.0, "D": 200.01}
    texts = []
    for letter in LETTERS:
        for number in range(1 if letter == "D" else each):
            split = "val" if number == each - 1 else "train"
            texts.append(
                f"BEGIN IONS\nTITLE={letter}{number}\nPEPMASS={masses[letter]}\nSPLIT={split}\n"
                f"INCHIKEY={letter * 14}-UHFFFAOYSA-N\n"
                f"{50 + 17 * LETTERS.index(letter)}.{number} 5\n{60 + number} 1\nEND IONS\n"
            )
    texts.append("BEGIN IONS\nTITLE=none\nPEPMASS=200\n50 1\nEND IONS\nBEGIN IONS\nTITLE=bad\nEND IONS\n")
    path.write_text("".join(texts))
    return path


def found_in(path: Path, **options: int) -> dict[str, Entry]:
    reader = SpectrumTriplets(path, molecule="inchikey", **options)
    found = list(reader.entries())
    assert [one.id for one in found if isinstance(one, Rejection)] == ["bad"]
    entries = {one.id: one for one in found if isinstance(one, Entry)}
    for entry in entries.values():
        assert_same(reader.read(entry.place), entry.arrays)
    return entries


def test_positives_are_of_its_molecule_and_negatives_of_another_of_its_mass_and_split(tmp_path: Path) -> None:
    entries = found_in(library(tmp_path / "x.mgf"))
    first = entries["A0"].arrays
    assert first["positives.precursor_mz"].tolist() == [200.0]  # A1: A2 is of another split
    assert set(first["negatives.precursor_mz"].round(2).tolist()) == {np.float32(200.03), np.float32(200.01)}
    assert len(first["negatives.precursor_mz"]) == 3
    assert first["positive.mz"].tolist() == pytest.approx([50.1, 61])
    assert first["negative.spectrum"].tolist() == [0, 0, 1, 1, 2, 2]
    for name in ("C0", "D0", "A2", "none"):  # no negative, no positive, neither, no molecule
        assert "positive.mz" not in entries[name].arrays
    plain = {one.id: one for one in Spectra(tmp_path / "x.mgf", molecule="inchikey").entries()}
    assert_same(plain["C0"].arrays, entries["C0"].arrays)


def test_spectra_of_one_run_are_pairs_and_one_without_a_time_has_none(tmp_path: Path) -> None:
    for name, seconds in (("a", (60, 70, "")), ("b", (80, 90))):
        blocks = [
            f"BEGIN IONS\nPEPMASS=200\nRTINSECONDS={time}\nRUN={name}\n{50 + at} 1\nEND IONS\n"
            for at, time in enumerate(seconds)
        ]
        (tmp_path / f"{name}.mgf").write_text("".join(blocks))
        with (tmp_path / "c.mgf").open("a") as both:
            both.writelines(blocks)
    for reader in (SpectrumPairs(tmp_path / "c.mgf", run="RUN"), SpectrumPairs(tmp_path)):
        entries = [entry for entry in reader.entries() if isinstance(entry, Entry)]
        found = [entry.arrays.get("others.retention_s", np.zeros(0)).tolist() for entry in entries]
        for entry in entries:
            assert_same(reader.read(entry.place), entry.arrays)
        assert found[2] == []
        assert [set(found[at]) <= {[70.0, 60.0, 0, 90.0, 80.0][at]} for at in (0, 1, 3, 4)] == [True] * 4
        assert any(found)


def test_splits_by_murcko_scaffold_keep_molecules_with_the_same_rings_together(tmp_path: Path) -> None:
    molecules = {  # of five scaffolds: benzene, pyridine, naphthalene, cyclohexane and none
        "Cc1ccccc1": "benzene", "InChI=1S/C6H6O/c7-6-4-2-1-3-5-6/h1-5,7H": "benzene", "CCc1ccncc1": "pyridine",
        "c1ccc2ccccc2c1": "naphthalene", "OC1CCCCC1": "cyclohexane", "CCO": "", "CCCCN": "", "n/a": None, "C1CC": "bad",
    }  # fmt: skip
    blocks = [
        f"BEGIN IONS\nTITLE={at}\nPEPMASS=99\nSMILES={text}\n50 1\nEND IONS\n" for at, text in enumerate(molecules)
    ]
    (tmp_path / "x.mgf").write_text("".join(blocks))
    entries = list(Spectra(tmp_path / "x.mgf", murcko="smiles").entries())
    splits = [entry.split for entry in entries if isinstance(entry, Entry)]
    assert splits[0] == splits[1] != ""
    assert splits[5:] == ["train", "train", ""]
    assert isinstance(entries[-1], Rejection)
    many = {scaffold_split(f"C1{'C' * size}C1") for size in range(1, 60)}
    assert many == {"train", "val", "test"}


def test_without_rdkit_splits_by_scaffold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffolds, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as refused:
        Spectra(library(tmp_path / "x.mgf"), murcko="inchikey")
    assert refused.value.where == "data.options.murcko"
    assert "pip install" in refused.value.remedy


def test_an_item_draws_one_of_its_candidates_by_its_own_numbers(tmp_path: Path) -> None:
    entries = found_in(library(tmp_path / "x.mgf", 12))
    task = SpectraFinetune(head="embedding", **SMALL)
    batch = batch_of([entries[name].arrays for name in ("A0", "C0", "B1")], ["A0", "C0", "B1"])
    together = task.collate(batch.items, np.random.default_rng(0))
    assert together.anchor_T.tolist() == [0, 2]
    assert task.weights(together) == {"triplet": 2.0}
    alone = task.collate(batch.items[2:], np.random.default_rng(9))
    assert torch.equal(alone.peaks.mz_BL, together.peaks.mz_BL[[2, 4, 6]])
    assert task.outputs(task.model().eval(), together)["embedding"].shape == (3, 16)


def test_a_negative_that_is_of_another_anchors_molecule_is_no_wrong_answer_to_that(tmp_path: Path) -> None:
    task = SpectraContrast(**SMALL)
    batch = task.collate(made_batch(task, tmp_path / "x.mgf"), np.random.default_rng(0))
    embedded = dict(task.embed(task.model().eval(), batch))
    of_molecules = {int(one): torch.nn.functional.one_hot(torch.tensor(place), 9).float()
                    for place, one in enumerate(batch.molecule_S.unique())}  # fmt: skip
    for name, molecules in (("anchor", "molecule"), ("positive", "molecule"), ("negative", "negative_molecule")):
        embedded[name] = torch.stack([of_molecules[one] for one in embedded[molecules].tolist()])
    ((total, weight),) = task.contrast(task.model(), embedded).values()  # every molecule far from every other
    assert float(total) / weight < 1e-3


def made_batch(task: SpectraFinetune, path: Path) -> list[ItemTensors]:
    entries = [entry for entry in found_in(library(path, 6)).values() if "positive.mz" in entry.arrays]
    return batch_of([entry.arrays for entry in entries], [entry.id for entry in entries]).items[:]


@pytest.mark.parametrize("kind", [SpectraFinetune, SpectraContrast])
def test_gradients_of_micro_batches_are_those_of_one_batch(tmp_path: Path, kind: type[SpectraFinetune]) -> None:
    task, rng = kind(head="embedding", margin=0.5, **SMALL), np.random.default_rng(0)
    items = made_batch(task, tmp_path / "x.mgf")
    found = []
    for cuts in ((0, len(items)), (0, 3, 4, len(items))):
        torch.manual_seed(0)
        model = task.model().double()
        step = make_step(task, StepSettings(optimizer="sgd", learning_rate=1.0), model=model)
        torch.manual_seed(0)
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        parts = [items[start:stop] for start, stop in pairwise(cuts)]
        step.run([double(task.collate(part, rng)) for part in parts])
        found.append({name: one.detach() - before[name] for name, one in model.named_parameters()})
        items = made_batch(task, tmp_path / "x.mgf")  # whose draws begin again
    assert max(float(one.abs().max()) for one in found[0].values()) > 1e-4
    for name, one in found[0].items():
        assert (one - found[1][name]).abs().max() < 1e-10


def test_without_inchi_keys_spectra_cannot_be_related(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known by their InChI keys"):
        SpectrumTriplets(library(tmp_path / "x.mgf"))
