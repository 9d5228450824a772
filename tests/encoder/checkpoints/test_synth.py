from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

import esm
import pytest
import torch

from pipeline.encoder.checkpoints.esm_checkpoint import frequencies, load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import PAD, VOCABULARY
from pipeline.errors import ConfigError


def fair_esm(path: Path) -> tuple[esm.model.esm2.ESM2, esm.Alphabet]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
    return model.eval(), alphabet


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_fair_esm_loads_what_was_written_and_every_bit_is_the_same(tiny: Path) -> None:
    model, _ = fair_esm(tiny)
    theirs, ours = model.state_dict(), load_esm_checkpoint(tiny)

    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.tensors.items())
    assert torch.equal(ours.rotary_F, theirs["layers.2.self_attn.rot_emb.inv_freq"])
    left = {name.split(".")[0] for name in theirs.keys() - ours.tensors.keys() if "inv_freq" not in name}
    assert left == {"lm_head", "contact_head"}


def test_what_fair_esm_computes_with_it_is_finite_and_differs_between_residues(tiny: Path) -> None:
    model, alphabet = fair_esm(tiny)
    _, _, tokens = alphabet.get_batch_converter()([("a", "MKTAYIAKQRQISFVKSHFSRQ")])
    with torch.inference_mode():
        found = model(tokens, repr_layers=[3], return_contacts=True)

    rows_LD = found["representations"][3][0]
    assert rows_LD.isfinite().all()
    assert rows_LD.std(dim=0).min() > 0.1
    assert found["contacts"].isfinite().all()


def test_our_vocabulary_is_that_of_fair_esm(tiny: Path) -> None:
    _, alphabet = fair_esm(tiny)

    assert tuple(alphabet.all_toks) == VOCABULARY


def test_same_seed_writes_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    paths = [tmp_path / f"esm2_{name}.pt" for name in "abc"]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        write_random_checkpoint(path, 1, 8, 2, seed=seed)

    assert sha256(paths[0]) == sha256(paths[1])
    assert sha256(paths[0]) != sha256(paths[2])


def test_stress_multiplies_queries_and_keys_and_nothing_else(tmp_path: Path) -> None:
    for name, stress in (("plain", 1.0), ("stress", 6.0)):
        write_random_checkpoint(tmp_path / f"esm2_{name}.pt", 2, 16, 2, stress=stress)
    plain, stressed = (load_esm_checkpoint(tmp_path / f"esm2_{name}.pt").tensors for name in ("plain", "stress"))

    differ = {name for name in plain if not torch.equal(plain[name], stressed[name])}
    assert differ == {f"layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"}
    assert all(torch.equal(plain[name] * 6, stressed[name]) for name in differ)


def test_rotary_frequencies_are_rounded_as_the_published_ones_are(tiny: Path) -> None:
    rotary_F = load_esm_checkpoint(tiny).rotary_F

    assert torch.equal(rotary_F, frequencies(8).half().float())
    assert not torch.equal(rotary_F, frequencies(8))


def test_row_of_padding_is_zero_as_fair_esm_makes_it(tiny: Path) -> None:
    table_VD = load_esm_checkpoint(tiny).tensors["embed_tokens.weight"]

    assert not table_VD[PAD].any()
    assert table_VD.any(dim=1).sum() == len(VOCABULARY) - 1


@pytest.mark.parametrize(
    ("layers", "dim", "heads", "said"),
    [
        (0, 32, 4, "at least 1"),
        (1, 32, 0, "at least 1"),
        (1, -4, 1, "at least 1"),
        (1, 30, 4, "does not divide"),
        (1, 12, 4, "even width"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(
    tmp_path: Path, layers: int, dim: int, heads: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        write_random_checkpoint(tmp_path / "esm2_a.pt", layers, dim, heads)

    assert list(tmp_path.iterdir()) == []


def test_width_that_is_proposed_instead_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        write_random_checkpoint(tmp_path / "esm2_a.pt", 1, 30, 4)
    write_random_checkpoint(tmp_path / "esm2_a.pt", 1, int(refusal.value.remedy.split()[-1]), 4)


@pytest.mark.parametrize("name", ["random.pt", "esm2.bin", "esm1b_t33.pt", "esm2"])
def test_name_by_which_fair_esm_would_not_know_it_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"esm2….pt") as refusal:
        write_random_checkpoint(tmp_path / name, 1, 8, 2)

    proposed = Path(refusal.value.remedy.removeprefix("--out "))
    write_random_checkpoint(proposed, 1, 8, 2)


@pytest.mark.parametrize("there", ["esm2_a.pt", "esm2_a-contact-regression.pt"])
def test_file_that_is_there_is_never_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")

    with pytest.raises(ConfigError, match="is there already"):
        write_random_checkpoint(tmp_path / "esm2_a.pt", 1, 8, 2)
    assert (tmp_path / there).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_disk_that_fails_leaves_no_checkpoint_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.encoder.checkpoints.synth.os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_random_checkpoint(tmp_path / "esm2_a.pt", 1, 8, 2)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_takes_only_a_part_leaves_no_rest(tmp_path: Path) -> None:
    code = (
        "import resource, signal; from pathlib import Path; "
        "from pipeline.encoder.checkpoints.synth import write_random_checkpoint; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        f"write_random_checkpoint(Path({str(tmp_path / 'esm2_a.pt')!r}), 2, 64, 4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "ConfigError" in done.stderr
    assert "the disk took only a part" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folder_that_may_not_be_written_is_named(unprivileged: Path) -> None:
    (unprivileged / "closed").mkdir(mode=0o555)

    with pytest.raises(ConfigError, match="Permission denied") as refusal:
        write_random_checkpoint(unprivileged / "closed" / "esm2_a.pt", 1, 8, 2)
    assert "closed" in refusal.value.where
