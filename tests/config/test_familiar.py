"""The words of other tools are answered with what they are called here."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.config.familiar_words import FAMILIAR
from pipeline.config.schema import FIELDS, LEAVES
from pipeline.readers.captions import Captions
from pipeline.readers.peptide_spectra import PeptideSpectra
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.rna.pocket_reader import RnaPockets
from pipeline.tasks.rna_ligand import RnaLigand
from pipeline.tasks.spectra_finetune import SpectraFinetune

GUIDES = Path(__file__).parents[2] / "docs" / "guides.md"
KEY = re.compile(r"\b(?:data|graph|embed|train|cache|cluster)(?:\.[a-z_]+)+")
ROW = re.compile(r"^\| (?P<theirs>[^|]*)\|", re.MULTILINE)


def test_a_word_of_other_tools_is_answered_with_the_key(complaint: Any) -> None:
    for word, key in {
        "train.batch_size": "train.effective_batch",
        "batch_size": "train.effective_batch",
        "train.gradient_accumulation_steps": "train.effective_batch",
        "train.num_workers": "train.threads",
        "train.pin_memory": "train.pin",
        "train.lr": "train.learning_rate",
        "train.val_check_interval": "train.validation.every",
    }.items():
        assert key in complaint("data: {path: a}\n", f"{word}=1"), word


def test_what_is_answered_is_a_key() -> None:
    for answer in FAMILIAR.values():
        keys = [tuple(key.split(".")) for key in KEY.findall(answer)]
        assert keys, answer
        assert all(key in FIELDS or key[:2] in {("train", "options"), ("data", "options")} for key in keys), answer


TASKS = (
    ComplexDocking,
    ContrastivePair,
    DenovoRecursive,
    RnaLigand,
    SpectraFinetune,
    Captions,
    PeptideSpectra,
    RnaPockets,
)


def test_every_knob_of_the_guides_is_answered() -> None:
    theirs = [
        word for row in ROW.finditer(GUIDES.read_text()) for word in re.findall(r"`([a-z][a-z_]+)\b", row["theirs"])
    ]
    own = {field.name for task in TASKS for field in fields(task)}  # tables of a recipe's own options
    recipes = {path.stem for path in (GUIDES.parents[1] / "configs/recipes").glob("*.yaml")}  # rows of a table, too
    known = {key[-1] for key in LEAVES} | set(FAMILIAR) | own | recipes
    assert {"val_check_interval", "save_top_k", "in_mem", "no_graph_cache"} <= set(theirs)
    assert [word for word in theirs if "_" in word and word not in known] == []
