"""`pipeline demo`: a small project of synthetic complexes, in which every other command works."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.setup.demo_recipes import what_was_made, write_recipe_demo
from pipeline.structures.synthetic import write_demo

if TYPE_CHECKING:
    from pathlib import Path

COMPLEXES = 24
ACTIVATE = "\n  source {}/bin/activate"
CONFIG = """\
# A small project of made complexes. Every other command works here as it does on real data:
#   pipeline config show      every value and where it comes from
#   pipeline submit --stage all --executor local --follow
data:
  source: manifest
  path: data/manifest.csv       # id, path, chains and split of each complex
  max_rejected_fraction: 0.1    # one of the 25 files is broken on purpose

embed:
  weights: weights/esm2_demo.pt # random ones, of the real format; yours: pipeline weights fetch

train:
  task: "pipeline.tasks.interface:Interface"   # which residues touch the other partner; yours: package.module:Name
  options: {embedding_dim: 32, width: 16, layers: 2, pair_width: 8}
  models: models
  epochs: 6
  effective_batch: 4
  learning_rate: 0.01           # high, as there is little to learn: contacts are of aromatic residues
  validation: {monitor: contact_auroc}

cache:
  root: cache

cluster:
  executor: local               # this machine
  runs: runs
"""


def make_project(folder: Path, recipe: str | None = None) -> Path:
    """Write the project, or a recipe's, and return its configuration file; raise for a folder that is not empty."""
    from pipeline.encoder.checkpoints.synth import write_random_checkpoint  # it imports torch

    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            what = "the demo wants a new or an empty folder"
            raise ConfigError(what, where=str(folder), remedy="pipeline demo DIR")
        if recipe is not None:
            return write_recipe_demo(folder, recipe)
        write_demo(folder / "data", COMPLEXES)
        write_random_checkpoint(folder / "weights" / "esm2_demo.pt", layers=3, dim=32, heads=4)
        config = folder / "pipeline.yaml"
        config.write_text(CONFIG)
    except OSError as error:
        raise ConfigError(f"cannot write: {error.strerror}", where=str(folder), remedy="pipeline demo DIR") from error
    return config


def what_to_look_at(folder: Path, recipe: str | None = None) -> str:
    """Return the commands to try next."""
    if recipe is not None:
        return what_was_made(folder, recipe)
    activate = "" if "VIRTUAL_ENV" in os.environ or sys.prefix == sys.base_prefix else ACTIVATE.format(sys.prefix)
    return f"""
Look around:{activate}
  cd {shlex.quote(str(folder))}
  less data/manifest.csv                 24 complexes with shared antigens, and one broken file
  pipeline status                        what was accepted, and why one was not
  pipeline submit --stage all --executor local --follow       again: everything is cached
  pipeline plan --stage train                                 what training takes, before it runs
  pipeline submit --stage train --executor local --follow --set train.epochs=8       goes on where it was left
  pipeline submit --stage predict --executor local --follow   what the model says of every complex
  pipeline report                                             what was asked for beside what was used
  pipeline weights check                 the small random ESM-2 that it ran
  pipeline cache stat                    what the cache holds
  pipeline config show                   every setting and where it comes from
  pipeline doctor                        whether this machine is ready"""
