"""The names of the stages; in a module of their own, as every command needs them without other records."""

from __future__ import annotations

from enum import StrEnum


class StageName(StrEnum):
    """The stages of the workflow, in order."""

    SCAN = "scan"
    EMBED = "embed"
    GRAPH = "graph"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    VALIDATE = "validate"
    REGENERATE = "regenerate"

    __str__ = str.__str__  # texts, paths and commands show the value
