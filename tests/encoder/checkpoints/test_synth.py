from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import esm
import pytest
import torch

from pipeline.encoder.embedding_recipe import PAD, VOCABULARY
from pipeline.encoder.esm_checkpoint import frequencies, load_esm_checkpoint
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import ConfigError


def fair_esm(path: Path) -> tuple[esm.model.esm2.ESM2, esm.Alphabet]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
    return model.eval(), alphabet


def test_fair_esm_loads_what_was_written_and_every_bit_is_the_same(tiny):
    model, alphabet = fair_esm(tiny)
    theirs, ours = model.state_dict(), load_esm_checkpoint(tiny)

    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.tensors.items())
    assert torch.equal(ours.rotary_F, theirs["layers.2.self_attn.rot_emb.inv_freq"])
    left = {name.split(".")[0] for name in theirs.keys() - ours.tensors.keys() if "inv_freq" not in name}
    assert left == {"lm_head", "contact_head"}
    assert tuple(alphabet.all_toks) == VOCABULARY
    table_VD = ours.tensors["embed_tokens.weight"]
    assert not table_VD[PAD].any()
    assert table_VD.any(dim=1).sum() == len(VOCABULARY) - 1
    assert torch.equal(ours.rotary_F, frequencies(8).half().float())  # rounded as the published ones are
    _, _, tokens = alphabet.get_batch_converter()([("a", "MKTAYIAKQRQISFVKSHFSRQ")])
    with torch.inference_mode():
        found = model(tokens, repr_layers=[3], return_contacts=True)
    rows_LD = found["representations"][3][0]
    assert rows_LD.isfinite().all()
    assert rows_LD.std(dim=0).min() > 0.1
    assert found["contacts"].isfinite().all()


def test_stress_multiplies_queries_and_keys_and_nothing_else(tmp_path):
    for name, stress in (("plain", 1.0), ("stress", 6.0)):
        write_random_checkpoint(tmp_path / f"esm2_{name}.pt", 2, 16, 2, stress=stress)
    plain, stressed = (load_esm_checkpoint(tmp_path / f"esm2_{name}.pt").tensors for name in ("plain", "stress"))

    differ = {name for name in plain if not torch.equal(plain[name], stressed[name])}
    assert differ == {f"layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"}
    assert all(torch.equal(plain[name] * 6, stressed[name]) for name in differ)


def test_same_seed_writes_the_same_bytes_and_another_seed_does_not(tmp_path):
    written = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_random_checkpoint(tmp_path / f"esm2_{name}.pt", 1, 8, 2, seed=seed)
        written.append((tmp_path / f"esm2_{name}.pt").read_bytes())
    assert written[0] == written[1] != written[2]


def test_impossible_sizes_and_names_are_refused_before_anything_is_written_with_ones_that_work(tmp_path):
    for sizes in ((0, 32, 4), (1, 32, 0), (1, -4, 1), (1, 30, 4), (1, 12, 4)):
        with pytest.raises(ConfigError) as refusal:
            write_random_checkpoint(tmp_path / "esm2_a.pt", *sizes)
        if sizes == (1, 30, 4):
            proposed = int(refusal.value.remedy.split()[-1])
    for name in ("random.pt", "esm2.bin", "esm1b_t33.pt", "esm2"):  # by which fair-esm would not know it
        with pytest.raises(ConfigError) as refusal:
            write_random_checkpoint(tmp_path / name, 1, 8, 2)
    assert list(tmp_path.iterdir()) == []
    write_random_checkpoint(Path(refusal.value.remedy.removeprefix("--out ")), 1, proposed, 4)


@pytest.mark.parametrize("there", ["esm2_a.pt", "esm2_a-contact-regression.pt"])
def test_file_that_is_there_is_never_replaced(tmp_path, there):
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError):
        write_random_checkpoint(tmp_path / "esm2_a.pt", 1, 8, 2)
    assert (tmp_path / there).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


FULL = """
import resource, signal, sys; from pathlib import Path
from pipeline.encoder.synth import write_random_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
write_random_checkpoint(Path(sys.argv[1]), 2, 64, 4)
"""


def test_a_disk_that_fails_or_takes_only_a_part_leaves_nothing(tmp_path, monkeypatch):
    words = [sys.executable, "-c", FULL, str(tmp_path / "esm2_a.pt")]
    assert "ConfigError" in subprocess.run(words, capture_output=True, text=True, check=False).stderr

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError):
        write_random_checkpoint(tmp_path / "esm2_a.pt", 1, 8, 2)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_may_not_be_written_is_named(unprivileged):
    (unprivileged / "closed").mkdir(mode=0o555)
    with pytest.raises(ConfigError) as refusal:
        write_random_checkpoint(unprivileged / "closed" / "esm2_a.pt", 1, 8, 2)
    assert "closed" in refusal.value.where
