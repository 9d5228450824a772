"""A limit that kills, as people set it: what does not fit as one goes in windows, or is rejected."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from pipeline.encoder.synth import write_random_checkpoint
from pipeline.journal.run_folder import runs_in
from pipeline.store.cache_folder import CacheFolder
from tests.testkit.command import Command

WINDOW, OVERLAP = 5000, 256
LONG = 15000
CONFIG = f"""
structures: {{max_residues: 20000}}
data: {{source: fasta, path: data.fasta, max_rejected_fraction: 1.0}}
embed:
  weights: esm2_wide.pt
  long: {{length: {WINDOW}, overlap: {OVERLAP}}}
"""
SUBMIT = ("submit", "--stage", "embed", "--executor", "local", "--follow", "--set")
# What a process has taken when it begins to compute with these weights, after it compared itself with fair-esm.
RESIDENT = """
import os, sys
from pathlib import Path
import torch
import pipeline.stages.embed, pipeline.encoder.embed_texts
from pipeline.cluster.processes import used_bytes
from pipeline.device.accelerator import free_caches
from pipeline.encoder.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.esm2 import EsmEncoder
from pipeline.encoder.parity import Reference
torch.set_num_threads(1)
checkpoint, cpu = load_esm_checkpoint(Path(sys.argv[1])), torch.device("cpu")
Reference(checkpoint, 1, cpu)  # what it imports stays
encoder = EsmEncoder(checkpoint, layer=1, precision="fp32", device=cpu)
free_caches("cpu")
print(used_bytes([os.getpid()]) >> 20)
"""


@pytest.fixture
def pipeline(monkeypatch, capsys):
    """Return the command line."""
    return Command(monkeypatch, capsys)


@pytest.mark.nightly
def test_a_memory_limit_that_kills_is_never_reached(tmp_path, monkeypatch, pipeline):
    monkeypatch.chdir(tmp_path)
    write_random_checkpoint(tmp_path / "esm2_wide.pt", layers=1, dim=1280, heads=20)
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    letters = "".join(np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), LONG + 180))
    long, *short = letters[:LONG], *(letters[at : at + 60] for at in range(LONG, LONG + 180, 60))
    (tmp_path / "data.fasta").write_text("".join(f">s{at}\n{text}\n" for at, text in enumerate([long, *short])))
    measure = [sys.executable, "-c", RESIDENT, "esm2_wide.pt"]
    resident_mib = int(subprocess.run(measure, check=True, capture_output=True, text=True).stdout)

    # To compare takes 190 MiB for a moment. A window is reckoned as 287 MiB, the rows of the long one as 146; as one,
    # it would take 567 and its rows. Each limit is a hundred MiB from the next of these: no two machines start alike.
    done = pipeline(*SUBMIT, f"cluster.embed.mem={resident_mib + 310}MiB")
    assert done.code == 0, done.err
    (rejected,) = map(json.loads, runs_in(tmp_path / "runs")[-1].rejected.read_text().splitlines())
    assert (rejected["id"], rejected["reason"]) == ("s0", "does_not_fit")
    assert "cluster.embed.mem" in rejected["detail"]
    assert set(cuts(tmp_path)) == set(short)

    done = pipeline(*SUBMIT, f"cluster.embed.mem={resident_mib + 560}MiB")
    assert done.code == 0, done.err
    cut = {"policy": "windows", "length": WINDOW, "overlap": OVERLAP}
    assert cuts(tmp_path) == {long: cut} | dict.fromkeys(short)


def cuts(folder):
    """Return how each text that is stored was cut."""
    store = CacheFolder(folder / "cache").kind("embed")
    return {record.meta["text"]: record.meta["cut"] for record in store.read(store.keys())}
