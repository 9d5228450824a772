"""The task of RNA and ligands: what it sees, losses, batches, what it says of pockets, and what it takes."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from pipeline.errors import ConfigError, DataError
from pipeline.planning.task_contract import breaches
from pipeline.protocol import ITEMS
from pipeline.tasks.rna_ligand import RnaLigandContrast
from pipeline.training.evaluating.outputs import GatheredOutputs, OutputWriter
from tests.tasks.cases import apart, stepped
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of
from tests.tasks.rna.made import DIM, IDS, RNG, SIZES, SMALL, by_key, collated, model_of, pocket, three

pytestmark = pytest.mark.usefixtures("one_thread")
VARIANTS = {
    "as it is": {},
    "no gate": {"use_gate": False},
    "no norm": {"use_layer_norm": False},
    "no near pairs": {"use_nonbonded": False},
    "bonds alone": {"use_nonbonded": False, "use_multi_hop": False},
    "basic layers": {"use_improved_layers": False},
    "one weight an atom": {"num_attention_heads": 0},
    "lengths alone": {"use_enhanced_invariants": False},
    "vectors alone": {"hidden_irreps": "8x0e+4x1o"},
    "scalars alone": {"hidden_irreps": "8x0e"},
    "tensors alone": {"hidden_irreps": "8x0e+2x2e"},
    "version 2": {"version": 2},
}


def contrasted(task, **more):
    return RnaLigandContrast(**vars(task) | more)


# ---- sequences as an encoder of RNA sees them ----


@pytest.fixture
def targets():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=DIM).astype(np.float32) for name in ("1aaa_ARG", "2bbb_FMN")}


@pytest.fixture
def learned(tmp_path, targets):
    """The task in small, with a file of targets."""
    return replace(SMALL, targets=by_key(tmp_path / "targets.h5", targets))


KEYS = ("1aaa_ARG", "2bbb_FMN_model0", "FMN", "ARG")


def said_of(path, *keys):
    return by_key(path, {key: np.full(5, 1.0 + place, np.float32) for place, key in enumerate(keys)})


@pytest.fixture
def sequenced(learned, tmp_path):
    return replace(learned, sequences=said_of(tmp_path / "rna.h5", *KEYS), sequence_dim=5)


def test_a_sequence_is_that_of_the_pocket_or_its_complex_and_never_of_the_ligand_that_is_sought(sequenced, tmp_path):
    assert sequenced.collate(three()[:], RNG).sequence_BS[:, 0].tolist() == [1, 1, 2]
    less = replace(sequenced, sequences=said_of(tmp_path / "less.h5", "1aaa_ARG", "FMN"))
    with pytest.raises(DataError, match="2bbb_FMN_model0 or 2bbb_FMN has no vector"):
        less.collate(three()[:], RNG)


@pytest.mark.nightly
def test_with_sequences_it_keeps_the_contract_and_they_change_what_is_told(sequenced):
    assert list(breaches(sequenced, dict(SIZES[0]), three(), item_sizes=())) == []
    batch, model = sequenced.collate(three()[:], RNG), sequenced.model().eval()
    told = model(batch)
    assert not torch.allclose(told, model(batch._replace(sequence_BS=2 * batch.sequence_BS)))
    assert "sequence.weight" not in replace(sequenced, sequences=None, sequence_dim=0).model().state_dict()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sequence_dim": 0}, ConfigError, "must be set together"),
        ({"sequences": None}, ConfigError, "must be set together"),
        ({"sequence_dim": 4}, ConfigError, "--set train.options.sequence_dim=5"),
        ({"sequences": "rna.h5"}, ConfigError, "is relative"),
    ],
)
def test_sequences_that_do_not_fit_are_told(sequenced, options, error, said):
    with pytest.raises(error) as refused:
        replace(sequenced, **options).collate(three()[:], RNG)
    assert said in str(refused.value)


# ---- what it sees ----


def turned(batch, turn_33, shift_3):
    turn = torch.from_numpy(turn_33)
    return batch._replace(pos_N3=batch.pos_N3 @ turn.T + torch.from_numpy(shift_3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_turning_moving_or_mirroring_a_pocket_changes_nothing(variant):
    task = replace(SMALL, **VARIANTS[variant])
    model, batch = model_of(task), double(collated(pocket(0), pocket(1, 2), task=task))
    here = model(batch)
    turn_33 = Rotation.random(random_state=1).as_matrix()
    assert here.std() > 1e-2
    assert (model(turned(batch, turn_33, np.array([5.0, -40.0, 13.0]))) - here).abs().max() < 1e-9
    if task.use_multi_hop and task.version > 2:  # the sine of a dihedral tells a pocket from its mirror image
        assert (model(turned(batch, -turn_33, np.zeros(3))) - here).abs().max() > 1e-6


@pytest.mark.parametrize("kind", ["bonds", "angles", "dihedrals", "near"])
def test_entries_are_those_of_the_reader_and_each_kind_is_seen(kind):
    items = three()
    batch, model = double(SMALL.collate(items, RNG)), model_of()
    atoms, mine = len(items[0].values["atoms.pos"]), getattr(batch, kind)
    own = (mine.atom_PE >= atoms).all(0) & (mine.atom_PE < atoms + len(items[1].values["atoms.pos"])).all(0)
    told = items[1].values[f"{kind}.atom"].long() + atoms
    wanted = torch.cat([told, told.flip(1)]) if kind in ("bonds", "near") else told
    assert torch.equal(mine.atom_PE[:, own].T, wanted)
    other = mine._replace(constant_EK=mine.constant_EK + 0.5)
    apart = model(batch) - model(batch._replace(**{kind: other}))
    assert apart.abs().max() > 1e-6


def test_phases_are_turns_of_a_circle_and_degrees_only_for_published_weights():
    told = torch.from_numpy(pocket(0)["dihedrals.constant"])
    mended, published = (
        collated(pocket(0), task=replace(SMALL, as_published=as_published)).dihedrals.constant_EK
        for as_published in (False, True)
    )
    assert torch.equal(published, told)
    assert set(mended[:, 2].round(decimals=5).tolist()) == {0.0, 0.5}
    assert torch.equal(mended[:, :2], told[:, :2])


def test_features_are_measured_by_a_file_and_the_model_carries_it(tmp_path):
    np.savez(tmp_path / "n.npz", mean=np.array([0.1, 5, 10]), std=np.array([0.5, 3, 7]))
    task = replace(SMALL, feature_norm=str(tmp_path / "n.npz"))
    model, plain = model_of(task, torch.float32), model_of(dtype=torch.float32)
    batch = collated(pocket(0))
    assert task.files_read() == [tmp_path / "n.npz"]
    assert not torch.allclose(model(batch), plain(batch), atol=1e-3)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), plain(batch))


def test_a_pocket_without_angles_or_near_pairs_is_an_item():
    alone = dict(pocket(0))
    for kind in ("angles", "dihedrals", "near"):
        for name in ("atom", "constant"):
            alone[f"{kind}.{name}"] = alone[f"{kind}.{name}"][:0]
    assert torch.isfinite(model_of(dtype=torch.float32)(collated(alone))).all()


# ---- batches ----


def test_a_step_with_an_item_that_has_no_target_is_the_same_however_it_is_cut(tmp_path, targets):
    del targets["2bbb_FMN"]
    path = by_key(tmp_path / "one.h5", targets)
    for loss_by in ("cosine", "cosine_mse"):
        task = replace(SMALL, loss_by=loss_by, targets_missing="skip", targets=path)
        whole, *cut = (
            stepped(task, [double(task.collate(three()[slice(*span)], RNG)) for span in spans], model_of(task))
            for spans in ([(0, 3)], [(0, 1), (1, 3)], [(0, 1), (1, 2), (2, 3)])
        )
        assert max(float(one.abs().max()) for one in whole.values()) > 1e-4
        assert max(apart(whole, one) for one in cut) < 1e-10


def test_two_models_of_one_complex_are_no_negatives_of_each_other(learned):
    vectors = torch.nn.functional.normalize(torch.randn(3, DIM, dtype=torch.float64, generator=torch.manual_seed(0)))
    targets_BD = SMALL.example({"atoms": 3, ITEMS: 3}).target_BD.double()
    targets_BD[1] = targets_BD[0]
    rows = {"embedding": vectors, "target": targets_BD}
    ((mended, _),) = contrasted(learned).contrast(None, rows).values()
    ((published, _),) = contrasted(learned, as_published=True).contrast(None, rows).values()
    logits = vectors @ torch.nn.functional.normalize(targets_BD).T / 0.07
    rest = [[0, 2], [1, 2], [0, 1, 2]]
    missed = [(logits[at, those].logsumexp(0) + logits[those, at].logsumexp(0)) / 2 - logits[at, at]
              for at, those in enumerate(rest)]  # fmt: skip
    assert float(mended) == pytest.approx(float(sum(missed)))
    assert float(published) > float(mended) + 0.5


# ---- targets ----


def test_models_of_a_complex_have_the_target_of_the_complex(learned, targets):
    batch = learned.collate(three(), RNG)
    wanted = [targets["1aaa_ARG"], targets["1aaa_ARG"], targets["2bbb_FMN"]]
    assert np.array_equal(batch.target_BD.numpy(), np.stack(wanted))
    assert learned.loss(model_of(dtype=torch.float32), batch)["target"][1] == 3.0


def test_targets_are_measured_by_a_file_where_one_is_named(tmp_path, learned, targets):
    np.savez(tmp_path / "t.npz", mean=np.full(DIM, 2.0), std=np.full(DIM, 4.0))
    batch = replace(learned, target_norm=str(tmp_path / "t.npz")).collate(three(), RNG)
    assert np.allclose(batch.target_BD[0].numpy(), (targets["1aaa_ARG"] - 2) / 4)


def test_an_item_without_a_target_is_named_with_the_file_and_how_many_it_has(learned):
    with pytest.raises(DataError, match=r"3ccc_GTP or GTP has no target in .*targets\.h5, which has 2 ids") as caught:
        collated(pocket(0), task=learned, ids=["3ccc_GTP"])
    assert "targets_missing=skip" in caught.value.remedy


def test_items_without_a_target_have_no_weight_where_they_are_skipped(learned):
    task = replace(learned, targets_missing="skip")
    items = batch_of([pocket(0), pocket(1)], [IDS[0], "elsewhere"]).items[:]
    model = model_of(task, torch.float32)
    with torch.no_grad():
        total, weight = task.loss(model, task.collate(items, RNG))["target"]
        alone, _ = task.loss(model, task.collate(items[:1], RNG))["target"]
        found = task.outputs(model, task.collate(items, RNG))
    assert weight == 1.0
    assert float(total) == pytest.approx(float(alone), rel=1e-4)
    assert [one.numel() for one in found["embedding"]] == [DIM, DIM]
    assert [one.numel() for one in found["target"]] == [DIM, 0]


def test_training_without_targets_says_what_to_set_and_predicting_does_not_need_them():
    batch, model = collated(pocket(0)), model_of(dtype=torch.float32)
    with pytest.raises(ConfigError, match="no targets are set") as caught:
        SMALL.loss(model, batch)
    assert caught.value.where == "train.options.targets"
    found = SMALL.outputs(model, batch)
    assert found["embedding"][0].shape == (DIM,)
    assert SMALL.metrics({name: [one.detach().numpy() for one in values] for name, values in found.items()}) == {}


# ---- what it says of pockets ----


def ranked(tmp_path, metric="euclidean"):
    """A task with a library in which the vector of pocket 0 stands for ARG."""
    vector_D = model_of(dtype=torch.float32)(collated(pocket(0)))[0].detach().numpy()
    others = {f"L{place}": vector_D + place + 1 for place in range(20)}
    path = by_key(tmp_path / "library.h5", {**others, "ARG": vector_D + 2.5})
    return replace(SMALL, library=path, distance=metric, top=3)


def test_with_a_library_ranks_and_how_well_ligands_are_found_are_told(tmp_path):
    task = ranked(tmp_path)
    batch = task.collate(batch_of([pocket(0), pocket(0), pocket(0)], [*IDS[:2], "9zzz_XYZ"]).items[:], RNG)
    with torch.no_grad():
        outputs = task.outputs(model_of(dtype=torch.float32), batch)
    assert [rank.tolist() for rank in outputs["rank"]] == [[3.0], [3.0], []]  # of the third there is no ligand
    figures = task.metrics({name: [one.numpy() for one in values] for name, values in outputs.items()})
    assert figures["median_rank"] == 3.0
    assert (figures["recall_at_1"], figures["recall_at_5"]) == (0.0, 1.0)
    assert (figures["hit_top_5_percent"], figures["hit_top_20_percent"]) == (0.0, 1.0)


def test_predictions_are_a_table_of_the_nearest_ligands_of_each_pocket(tmp_path):
    task = ranked(tmp_path)
    batch = task.collate(batch_of([pocket(0), pocket(1)], IDS[:2]).items[:], RNG)
    with torch.no_grad(), OutputWriter(tmp_path / "parts", 0) as writer:
        writer.add(IDS[:2], [0, 1], task.outputs(model_of(dtype=torch.float32), batch))
    (table,) = task.publish(tmp_path, GatheredOutputs(tmp_path / "parts"), (), None)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["query", "rank", "ligand_id", "distance", "metric", "is_true"]
    assert [row["query"] for row in rows] == [IDS[0]] * 3 + [IDS[1]] * 3
    assert [row["ligand_id"] for row in rows[:3]] == ["L0", "L1", "ARG"]
    assert [int(row["rank"]) for row in rows] == [1, 2, 3] * 2
    assert float(rows[0]["distance"]) == pytest.approx(DIM**0.5, rel=1e-4)
    assert {row["metric"] for row in rows} == {"euclidean"}
    assert [(row["ligand_id"], row["is_true"]) for row in rows[:3]] == [("L0", "no"), ("L1", "no"), ("ARG", "yes")]


def test_a_library_of_another_width_is_refused_with_what_to_set(tmp_path):
    path = by_key(tmp_path / "library.h5", {"ARG": np.ones(DIM + 1, np.float32)})
    with pytest.raises(ConfigError, match="have 9 numbers, but the model outputs 8") as caught:
        replace(SMALL, library=path).outputs(model_of(dtype=torch.float32), collated(pocket(0), ids=IDS[:1]))
    assert caught.value.remedy == "--set train.options.output_dim=9"


# ---- bad input ----


def test_items_of_another_reader_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"reads RNA pockets .* item0 has peaks\.mz") as caught:
        collated({"peaks.mz": np.ones(3, np.float32)})
    assert "data.reader=pipeline.tasks.rna.pocket_reader:RnaPockets" in caught.value.remedy
    with pytest.raises(ConfigError, match="reads RNA pockets"):
        SMALL.cost({"nodes": 3, "edges": 4})


def test_entries_that_are_switched_off_are_not_there_and_cost_nothing():
    sizes = {"atoms": 5, "bonds": 4, "angles": 3, "dihedrals": 2, "near": 6}
    assert SMALL.cost(sizes) == {"atoms": 5, "bonds": 8, "angles": 3, "dihedrals": 2, "near": 12}
    for option, kinds in (("use_multi_hop", ("angles", "dihedrals")), ("use_nonbonded", ("near",))):
        off = replace(SMALL, **{option: False})
        batch = collated(pocket(0), task=off)
        assert all(getattr(batch, kind).atom_PE.shape[1] == 0 for kind in kinds)
        assert off.cost(sizes).keys() == SMALL.cost(sizes).keys() - set(kinds)


def test_figures_are_means_over_the_items_that_have_a_target():
    one, other = np.array([3.0, 4.0], np.float32), np.array([0.0, 2.0], np.float32)
    found = {"embedding": [one, one, other], "target": [one, other, other[:0]]}
    assert SMALL.metrics(found) == pytest.approx({"cosine": (1 + 0.8) / 2, "mse": (0 + (9 + 4) / 2) / 2})
