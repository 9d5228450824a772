"""The names of the workflow's stages; apart, as every command line needs them and nothing else of the records."""

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

    __str__ = str.__str__  # in texts, paths and commands it is its value
