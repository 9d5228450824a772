"""The words of other tools are answered with what they are called here."""

from __future__ import annotations

import re
from typing import Any

from pipeline.config.schema import FIELDS
from pipeline.config.yaml_document import familiar_words

KEY = re.compile(r"\b(?:data|graph|embed|train|cache|cluster)(?:\.[a-z_]+)+")


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
    for answer in familiar_words().values():
        keys = [tuple(key.split(".")) for key in KEY.findall(answer)]
        assert keys, answer
        assert all(key in FIELDS or key[:2] in {("train", "options"), ("data", "options")} for key in keys), answer
