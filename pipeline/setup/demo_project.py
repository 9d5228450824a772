"""`pipeline demo`: makes a small project of synthetic complexes, in which every command works.

With `--recipe NAME` it makes a small version of that recipe, with synthetic data that follow a rule to learn.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.command_line import install_extra, quoted
from pipeline.config.load import read_config
from pipeline.errors import ConfigError
from pipeline.readers import made
from pipeline.setup.init_files import recipe_text
from pipeline.store.format.disk import written_to
from pipeline.structures.synthetic import write_demo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.config.schema import Config

SPLITS = ("train", "train", "train", "train", "val", "test")
HEAD = """\
# The recipe {name} at toy size, on synthetic data; written by `pipeline demo --recipe {name}`.
# At its real size, with comments: pipeline init DIR --recipe {name}
"""
PAIRS = 3  # pairs of proteins that dock
WIDTH = 16  # of the small encoder, and of the embedding of a ligand
COMPLEXES = 24
ACTIVATE = "\n  source {}/bin/activate"
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RecipeDemo:
    """A recipe at toy size: its data, with a rule to learn; `recipe_demos.ini` has the settings that make it small."""

    make: Callable[[Path, int], None]  # writes about this number of items into the project's folder
    metric: str  # validation metric that shows that the rule was learned
    items: int
    shows: tuple[str, ...] = ("predictions.csv",)  # predictions to look at first
    needs: tuple[str, str] | None = None  # required extra, and its module


def small_sets(name: str, folder: Path) -> list[str]:
    """Return the settings that make a recipe small, as `--set` takes them."""
    demos = ConfigParser(delimiters="=", interpolation=None)
    demos.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their case
    demos.read(Path(__file__).with_name("recipe_demos.ini"), encoding="utf-8")
    return [f"{key}={value.replace('FOLDER', str(folder.absolute()))}" for key, value in demos[name].items()]


def _complexes(folder: Path, items: int) -> None:
    """Write complexes of a few pairs of proteins, rotated and perturbed, so that their docking can be learned."""
    from pipeline.encoder.synth import write_random_checkpoint  # it imports torch
    from pipeline.structures.synthetic import shaken_pair, to_pdb

    structures = folder / "data" / "structures"
    structures.mkdir(parents=True)
    rows = ["path,split"]
    for number in range(items):
        for partner, letter in zip(shaken_pair(number // len(SPLITS) % PAIRS, number, 20), "rl", strict=True):
            (structures / f"c{number}_{letter}_b.pdb").write_bytes(to_pdb({letter.upper(): partner}))
        rows.append(f"c{number},{SPLITS[number % len(SPLITS)]}")
    (folder / "data" / "splits.csv").write_text("\n".join([*rows, ""]))
    write_random_checkpoint(folder / "weights" / "esm2_tiny.pt", layers=1, dim=WIDTH, heads=2)


def _spectra(folder: Path, items: int) -> None:
    made.molecules(folder / "data" / "spectra.mgf", items)


def _peptides(folder: Path, items: int) -> None:
    made.spectra(folder / "data" / "peptides.mgf", items, peptide_length=(4, 5), peaks=20, letters=6)


def _pockets(folder: Path, items: int) -> None:
    from pipeline.tasks.rna.made_pockets import write_pockets

    write_pockets(folder / "data", items, ligands=3, width=WIDTH, pairs=2)


def _captions(folder: Path, items: int) -> None:
    made.captions(folder / "data" / "captions.csv", items)


def _sequences(folder: Path, items: int) -> None:
    from pipeline.encoder.synth import write_random_checkpoint  # it imports torch

    made.sequences(folder / "data" / "sequences.csv", items)
    write_random_checkpoint(folder / "weights" / "esm2_tiny.pt", layers=2, dim=WIDTH, heads=2)


DEMOS = {
    "complex_docking": RecipeDemo(_complexes, "ligand_rmsd_median", 126, ("poses.csv",)),
    "spectra_finetune": RecipeDemo(_spectra, "r2", 900),
    "spectra_pretrain": RecipeDemo(_spectra, "order_accuracy", 900),
    "encoder_finetune": RecipeDemo(_sequences, "r2", 300),
    "denovo_recursive": RecipeDemo(_peptides, "residue_recall", 2000, ("peptides.csv",)),
    "rna_ligand": RecipeDemo(_pockets, "recall_at_1", 400, ("ranked_ligands.csv",), ("hdf5", "h5py")),
    "contrastive_pair": RecipeDemo(
        _captions, "left_to_right_at_1", 400, ("nearest_right.csv", "nearest_left.csv"), ("images", "PIL")
    ),
}


def write_recipe_demo(folder: Path, name: str) -> Path:
    """Write a small project of a recipe into an empty folder; return its configuration file."""
    text = recipe_text(name, None)
    demo = DEMOS[name]
    if demo.needs and find_spec(demo.needs[1]) is None:
        what = f"the demo of {name} needs {demo.needs[1]}, which is not installed (extra {demo.needs[0]})"
        raise ConfigError(what, where="--recipe", remedy=install_extra(demo.needs[0]))
    folder.mkdir(parents=True, exist_ok=True)
    demo.make(folder, demo.items)
    config = folder / "pipeline.yaml"
    config.write_text(text, encoding="utf-8")
    small = small_settings(read_config(config, small_sets(name, folder)).config, folder)
    sections = [f"{section}: {json.dumps(values)}" for section, values in small.items()]
    config.write_text("\n".join([HEAD.format(name=name), *sections, ""]), encoding="utf-8")
    return config


def small_settings(config: Config, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from the defaults, with paths relative to the project's folder.

    Paths among a task's options stay absolute, because jobs may read them from another folder.
    """
    defaults = read_config(None, ["data.path=nowhere"]).config.model_dump(mode="json")
    whole = config.model_dump(mode="json")
    plain = json.loads(json.dumps(whole).replace(f"{folder.absolute()}/", ""))
    plain["train"]["options"] = whole["train"]["options"]
    return {section: values for section, values in _differing(plain, defaults).items() if isinstance(values, dict)}


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults, in nested sections too."""
    kept = {
        name: _differing(value, defaults[name])
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
        else value
        for name, value in values.items()
        if value != defaults.get(name)
    }
    return {name: value for name, value in kept.items() if value != {}}


def what_was_made(folder: Path, name: str) -> str:
    """Describe what a recipe learned, its output, and commands to try next."""
    demo = DEMOS[name]
    made = [path for shown in demo.shows for path in sorted(folder.glob(f"predictions/*/{shown}"))]
    files = [f"  less {quoted(path.relative_to(folder))}" for path in made]
    return "\n".join([
        f"Learned: {learned(folder, demo.metric)}", "",
        "Try next:", f"  cd {quoted(folder)}", *files, "  pipeline status", "  pipeline report --html report.html",
        "  pipeline plan train", f"The recipe at its real size, with comments: pipeline init DIR --recipe {name}",
    ])  # fmt: skip


def learned(folder: Path, metric: str) -> str:
    """Return a metric of the validations after the first and the last epoch, and of the test items."""
    (log,), (tested,) = folder.glob("models/*/epochs.jsonl"), folder.glob("models/*/evaluations/*.json")
    epochs = [epoch for epoch in map(json.loads, log.read_text().splitlines()) if metric in epoch["validation"]]
    ends = epochs[0], epochs[-1]
    first, last = (f"{epoch['validation'][metric]:.3g} after epoch {epoch['epoch']}" for epoch in ends)
    test = json.loads(tested.read_text())["evaluation"]
    course = f"{first}, {last} (validation)"
    return f"{metric} {course}, {test['figures'][metric]:.3g} (test, n={test['items']})"


def make_project(folder: Path, recipe: str | None = None) -> Path:
    """Write the project, or a recipe's, and return its configuration file; raise for a folder that is not empty."""
    from pipeline.encoder.synth import write_random_checkpoint  # it imports torch

    with written_to(folder, "pipeline demo DIR"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("the demo needs a new or empty folder", where=str(folder), remedy="pipeline demo DIR")
        if recipe is not None:
            return write_recipe_demo(folder, recipe)
        write_demo(folder / "data", COMPLEXES)
        write_random_checkpoint(folder / "weights" / "esm2_demo.pt", layers=3, dim=32, heads=4)
        shutil.copyfile(PACKAGE / "tasks" / "demo_task.py", folder / "demo_task.py")
        return shutil.copyfile(PACKAGE / "setup" / "demo.yaml", folder / "pipeline.yaml")


def flip_a_byte(cache: Path) -> Path:
    """Damage a record of the scan in a cache, and return its file."""
    shard = next((cache / "scan" / "shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    return shard


def what_to_look_at(folder: Path, recipe: str | None = None) -> str:
    """Return the commands to try next."""
    if recipe is not None:
        return what_was_made(folder, recipe)
    activate = "" if "VIRTUAL_ENV" in os.environ or sys.prefix == sys.base_prefix else ACTIVATE.format(sys.prefix)
    return f"""\
Try next:{activate}
  cd {quoted(folder)}
  pipeline status                     What did the run do, and which file was rejected?
  pipeline submit --follow            What does a second run do? Nothing: all results are cached.
  pipeline plan train --gpu rtx4090   Would this training fit on another GPU?
  pipeline replay --step 1            Which complexes ran out of memory, and would they again?
  pipeline submit predict --follow    Which residues touch in each complex?
  pipeline config show                What can I change, and where is each value from?"""
