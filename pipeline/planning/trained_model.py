"""Trained models, from here or another machine: finds them by name, describes and exports them."""

from __future__ import annotations

import json
import secrets
import shutil
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline import __version__
from pipeline.codec import plain, read_plain, rebuilt
from pipeline.command_line import Command, quoted
from pipeline.config.load import from_resolved
from pipeline.config.schema import Config
from pipeline.config.schema_data import MAIN
from pipeline.config.schema_train import TrainSection
from pipeline.dataset.reader_items import is_reader
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.planning.prepare import embeddings_used, pathless
from pipeline.project.run_code import load_reader, load_task, source_digest, sources
from pipeline.training.evaluating.results import kept_figures
from pipeline.training.prepared import BEST, LAST, ModelFolder, Prepared
from pipeline.training.state import TRAINING
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pipeline.project.project import Project
    from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint

DECIDED = ("task", "options", "batching")  # settings of `train` that decide a model's inputs and layers
Plain: TypeAlias = "Mapping[str, Any]"
NOT_FOR_USE: dict[str, Collection[str]] = {  # section → settings that matter only for the training
    "data": ("path", "splits", "structures_dir", "limit", "labels", "on_leak", "max_rejected_fraction"),
    "structures": (),
    "graph": (),
    "embed": ("weights",),  # a path is replaced by that in the exported folder
    "train": TrainSection.model_fields.keys() - {*DECIDED, "embeddings"},
}
NOTHING_SET = Config.model_validate({"data": {"path": Path()}})
SHOWN = ("split", "items", "step", "data", "figures")  # of an evaluation


@dataclass(frozen=True)
class TrainedModel:
    """A model's folder, the plan of its training, and the chosen checkpoint."""

    folder: ModelFolder
    prepared: Prepared
    checkpoint: str  # best, last, or a path
    config: Config | None  # of its training; None if missing or of another version

    def on(self, table: str) -> Prepared:
        """Return the plan for another data set: that of the training, without its items."""
        return replace(self.prepared, table=table, skipped=(), crop={})

    def refuse_other_settings(self, project: Project) -> None:
        """Raise if the configuration would give the model other inputs than in its training."""
        here = _inputs(project.config)
        there = {f"train.{name}": self.prepared.recipe[name] for name in DECIDED if name in self.prepared.recipe}
        there |= _inputs(self.config) if self.config is not None else {}
        differ = [key for key, value in there.items() if here.get(key) != value]
        if differ:
            texts = [f"{key}: {json.dumps(there[key])} (here {json.dumps(here.get(key))})" for key in differ]
            problem = "\n  ".join(["the model was trained with other settings:", *texts])
            settings = [setting for key in differ for setting in _settings(key, there[key], here.get(key))]
            remedy = Command(()).with_settings(*settings).change
            raise ConfigError(problem, where=str(self.folder.path), remedy=f"the same command with {remedy}")
        theirs = self.prepared.recipe.get("embeddings")
        if theirs and not is_reader(project.config) and (mine := embeddings_used(project)) != theirs:
            raise self._of_other_embeddings(joined(theirs), joined(mine))

    def _of_other_embeddings(self, theirs: Sequence[Plain], mine: Sequence[Plain]) -> ConfigError:
        """Return the error for embeddings that the model was not trained on."""
        remedy = "the same command with --set embed.weights=FILE of that encoder   (pipeline config show)"
        texts, nothing = [], dict[str, Any]()
        for number, (there, here) in enumerate(zip_longest(theirs, mine, fillvalue=nothing), 1):
            names = sorted(name for name in {**there, **here} if there.get(name) != here.get(name))
            of = f"encoder {number}, " if max(len(theirs), len(mine)) > 1 else ""
            texts += [f"{of}{name}: {there.get(name)!r} (here {here.get(name)!r})" for name in names]
        if len(theirs) != len(mine) or all(plain in mine for plain in theirs):
            remedy = "name the same encoders in the same order in train.embeddings   (pipeline config show)"
        problem = "\n  ".join(["the model was trained on other embeddings:", *texts])
        return ConfigError(problem, where=str(self.folder.path), remedy=remedy)


def joined(embeddings: Plain) -> list[Plain]:
    """Join the recipes of embeddings, one for each encoder."""
    parts: list[Plain] = embeddings.get("joined", [embeddings])
    return parts


def model_names(models: Path) -> list[str]:
    """Return the names of the models in a folder, the newest last."""
    plans = sorted(models.glob("*/prepared.json"), key=lambda path: path.stat().st_mtime)
    return [path.parent.name for path in plans]


def names_model(wanted: str) -> bool:
    """Tell whether a setting names a trained model or a checkpoint."""
    return wanted not in (BEST, LAST)


def named_model(models: Path, wanted: str) -> TrainedModel | None:
    """Return the model that a setting names; None if it means the configured training or a checkpoint of it.

    A setting is a name in the folder of models, or the path of a model's folder, an exported one or a checkpoint. Files
    of weights are not models: they are used with the configured task.
    """
    from pipeline.training.checkpoints.checkpoint import weights_file

    if not names_model(wanted) or weights_file(wanted) is not None:
        return None
    if (path := place_of(models, wanted)) is not None:
        is_model = _is_model(path)
        return _read(path if is_model else path.parent.parent, checkpoint=BEST if is_model else str(path))
    if "/" in wanted or not wanted.startswith("step-"):
        there = model_names(models)
        listed = f"there are: {', '.join(there)}" if there else f"no model is in {models}"
        remedy = Command.of("model list", then="   (or the path of a model's folder, an exported one, or a checkpoint)")
        raise ConfigError(f"there is no such model; {listed}", where=wanted, remedy=remedy)
    return None


def place_of(models: Path, wanted: str) -> Path | None:
    """Return the folder of the named model or checkpoint; the folder of models comes first."""
    from pipeline.training.checkpoints.sealed_folder import MANIFEST

    for path in (models / wanted, Path(wanted).absolute()):
        with suppress(OSError):  # an impossible name, or no permission
            if _is_model(path) or (path / MANIFEST).is_file():
                return path
    return None


def _is_model(path: Path) -> bool:
    folder = ModelFolder(path)
    return folder.export.is_file() or folder.prepared.is_file()


def _read(path: Path, checkpoint: str) -> TrainedModel:
    folder = ModelFolder(path)
    is_export = folder.export.is_file()
    try:
        if is_export:
            from pipeline.training.checkpoints.checkpoint import read_export

            card = read_export(path).data
            prepared, settings = rebuilt(Prepared, card["prepared"]), json.dumps(card["settings"])
        else:
            prepared = read_plain(folder.prepared, Prepared)
            settings = folder.settings.read_text() if folder.settings.is_file() else ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"this is no model's folder of this version: {type(error).__name__}: {error}"
        remedy = Command.of("model list", then="   (names a model's folder, or a checkpoint in one)")
        raise DataError(problem, where=str(path), remedy=remedy) from error
    try:
        config = from_resolved(settings) if settings else None
    except PipelineError:  # another version: its settings cannot be compared
        config = None
    return TrainedModel(folder, prepared, str(path) if is_export else checkpoint, config)


def _inputs(config: Config) -> dict[str, Any]:
    """Return the settings that decide a model's inputs, by key."""
    train = config.train.model_dump(mode="json", include=set(DECIDED))
    decided = {f"train.{name}": value for name, value in train.items()}
    decided["train.options"] = pathless(config.train.options)
    if is_reader(config):
        return decided | {"data.reader": config.data.reader}
    graph = config.graph.model_dump(mode="json", exclude={"cache", "contacts"})  # contacts are labels
    atom, of_residues = graph.pop("atom"), ("neighbours", "radius")
    if config.graph.nodes == "atom":
        graph = {name: value for name, value in graph.items() if name not in of_residues}
        graph |= {f"atom.{name}": value for name, value in atom.items()}
    return decided | {f"graph.{name}": value for name, value in graph.items()}


def _settings(key: str, value: Any, here: Any) -> Iterator[tuple[str, str]]:
    """Yield the `--set` texts that give a setting this value, whatever it is now."""
    if isinstance(value, dict) and isinstance(here, dict) and here.keys() - value.keys():
        yield key, "null"  # first unset: mappings are merged
    yield key, value if isinstance(value, str) else json.dumps(value)


def model_card(model: TrainedModel) -> dict[str, Any]:
    """Return the card of a model as JSON data: its training, checkpoint, inputs and metrics."""
    if model.folder.export.is_file():
        from pipeline.training.checkpoints.checkpoint import read_export

        return {name: value for name, value in read_export(model.folder.path).data.items() if name != "settings"}
    from pipeline.training.checkpoints.checkpoint import open_checkpoint

    chosen, recipe = chosen_of(model), model.prepared.recipe
    manifest = open_checkpoint(chosen.path)
    own = ("embeddings", "code", "table", "task", "options")
    return {
        "name": model.prepared.name,
        "task": recipe.get("task"),
        "options": recipe.get("options", {}),
        "code": recipe.get("code"),
        "checkpoint": chosen.path.name,
        "step": chosen.step,
        "figure": manifest.metric,
        "monitor": model.config.train.validation.monitor if model.config else None,
        "data": str(model.config.data.path) if model.config else None,
        "encoder": _encoder(model),
        "recipe": {name: value for name, value in recipe.items() if name not in own},
        "precision": model.prepared.precision,
        "left_out": manifest.data.get(TRAINING, {}).get("damaged", []),  # skipped items: their records were damaged
        "killed": manifest.data.get(TRAINING, {}).get("killed", []),  # skipped items: a process died on them
        **_evaluations(model.folder.evaluations),
        "pipeline": __version__,
        "prepared": plain(model.prepared),
    }


def _encoder(model: TrainedModel) -> dict[str, Any] | None:
    """Return the identity of the encoder and its embeddings; None for a model without embeddings."""
    recipe = model.prepared.recipe.get("embeddings")
    if recipe and "joined" in recipe:
        return {f"encoder {number}": plain for number, plain in enumerate(recipe["joined"], 1)}
    file = {"file": model.config.of_encoder(model.config.encoders_read[0]).embed.weights.name} if model.config else {}
    return file | dict(recipe) if recipe else None


def chosen_of(model: TrainedModel) -> ChosenCheckpoint:
    """Return the chosen checkpoint of a model; raise if it has none."""
    from pipeline.training.checkpoints.checkpoint import choose_checkpoint

    chosen = choose_checkpoint(model.folder.checkpoints, model.checkpoint)
    if chosen is None:
        where = str(model.folder.checkpoints)
        raise DataError(
            "no checkpoint was kept yet", where=where, remedy=Command.of("status", then="   (is it trained?)")
        )
    return chosen


def _evaluations(folder: Path) -> dict[str, Any]:
    """Return the metrics of each evaluation with split, data and step; and the unreadable files."""
    kept = {path.name: kept_figures(path) for path in sorted(folder.glob("*.json"))}
    shown = [asdict(figures) for figures in kept.values() if figures is not None]
    return {
        "evaluations": [{name: figures[name] for name in SHOWN} for figures in shown],
        "unreadable": [name for name, figures in kept.items() if figures is None],
    }


def export_model(model: TrainedModel, folder: Path, beside: Path | None, form: str | None = None) -> dict[str, Any]:
    """Write everything that using a model needs into a new folder; return its card.

    `form` also writes the weights as some published system names them.
    """
    from pipeline.training.checkpoints.trained_weights import checkpoint_weights, write_export, write_published

    config = _exportable(model)
    chosen, card, settings = chosen_of(model), model_card(model), portable_settings(config)
    task, data = load_task(config.train.task, config.train.options, beside=beside), config.data
    code = dict(sources(task))
    if data.reader is not None:
        code |= sources(load_reader(data.reader, data.path, data.options, beside=beside))
    is_changed = source_digest(task) != card["code"]
    whole = card | {"code_changed": is_changed, "settings": json.loads(model.folder.settings.read_text())}
    weights = checkpoint_weights(chosen.path)
    with _written_whole(folder) as aside:
        if form is not None:
            write_published(aside, form, task.model(), weights)
        for name, path in sorted(code.items()):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, aside / name)
        head = "# The settings that this model was trained with, as far as using it needs them."
        sections = [f"{section}: {json.dumps(values)}" for section, values in settings.items()]
        (aside / "pipeline.yaml").write_text("\n".join([head, *sections, ""]))
        (aside / "README.md").write_text(card_text(card, settings))
        return write_export(aside, weights, whole)


def _exportable(model: TrainedModel) -> Config:
    """Return the settings of a model's training; raise if it cannot be exported."""
    if model.folder.export.is_file():
        copy = f"cp -r {quoted(model.folder.path)} FOLDER"
        raise ConfigError("this is an exported model: copy its folder", where=str(model.folder.path), remedy=copy)
    if model.config is None:
        problem = "the settings of its training are missing, or of another version"
        remedy = Command.submit("train", then="   (its next step writes them)")
        raise ConfigError(problem, where=str(model.folder.path), remedy=remedy)
    return model.config


@contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` at the end; a failure leaves nothing behind.

    Raise if `folder` exists or cannot be written.
    """
    folder = folder.resolve()
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            remedy = "name a folder that does not exist"
            raise ConfigError("something is there already", where=str(folder), remedy=remedy)
        aside.mkdir(parents=True)
        yield aside
        aside.replace(folder)
    except OSError as error:
        remedy = "pipeline model export MODEL FOLDER   (one with room, that can be written)"
        raise ConfigError(f"cannot write: {error.strerror or error}", where=str(folder), remedy=remedy) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def portable_settings(config: Config, *, there: bool = False) -> dict[str, Any]:
    """Return the settings for using a model on other data: those that differ from the defaults, without paths.

    Weights get their names in an exported folder or, with `there`, their paths at the training.
    """
    config = _with_encoders_read(config)
    plain, usual = config.model_dump(mode="json"), NOTHING_SET.model_dump(mode="json")
    kept: dict[str, dict[str, Any]] = {}
    for section, left_out in NOT_FOR_USE.items():
        values = {name: value for name, value in plain[section].items() if name not in left_out}
        kept[section] = {name: value for name, value in values.items() if value != usual[section][name]}
    if not is_reader(config):
        files = _names_of_weights(config, there=there)
        kept["embed"]["weights"] = files[config.embed.weights]
        for name, other in config.embed.also.items():
            own, base = plain["embed"]["also"][name], plain["embed"]
            differs = {key: value for key, value in own.items() if key != "also" and value != base[key]}
            kept["embed"]["also"][name] = differs | {"weights": files[other.weights]}
    return {section: values for section, values in kept.items() if values}


def _with_encoders_read(config: Config) -> Config:
    """Return the configuration with only the encoders that the model uses; the first becomes section embed."""
    first, *others = config.encoders_read
    if MAIN in others:
        first, others = MAIN, [name for name in config.encoders_read if name != MAIN]
        embeddings: Any = config.train.embeddings
    else:
        embeddings = (MAIN, *others) if others else "auto"
    also = {name: config.embed.also[name] for name in others}
    embed = (config.embed if first == MAIN else config.embed.also[first]).model_copy(update={"also": also})
    train = config.train.model_copy(update={"embeddings": embeddings})
    return config.model_copy(update={"embed": embed, "train": train})


def _names_of_weights(config: Config, *, there: bool) -> dict[Path, str]:
    """Return a unique place for the weights of each encoder: their paths `there`, or names in an exported folder."""
    names: dict[Path, str] = {}
    for encoder in config.encoders:
        path = config.of_encoder(encoder).embed.weights
        plain = str(path) if there else f"weights/{path.name}"
        names.setdefault(path, plain if plain not in names.values() else f"weights/{encoder}/{path.name}")
    return names


def card_text(card: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return a model's card as text for people, in Markdown."""
    reader = settings.get("data", {}).get("source") == "reader"
    data = "--set data.path=FILE" if reader else "--set data.source=glob --set data.path=FOLDER"
    embed = settings.get("embed", {})
    files = [embed.get("weights"), *(other["weights"] for other in embed.get("also", {}).values())]
    weights = "` and `".join(dict.fromkeys(map(str, files)))
    lines = [f"# {card['name']}", "", *card_lines(card), "", "## Use it", ""]
    if card["encoder"]:
        lines += [f"Put the encoder's checkpoint at `{weights}` (`pipeline weights import FILE`), then", ""]
    lines += ["```sh", "cd THIS_FOLDER", f"pipeline submit predict --model . {data} --follow", "```", ""]
    lines += ["Nothing is trained, and no labels are needed. In Python, without pipeline:", ""]
    load = ["from safetensors.torch import load_file", 'state = load_file("model.safetensors")']
    return "\n".join([*lines, "```python", *load, "```", ""])


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """Return the facts of a card, a line each."""
    options = ", ".join(f"{name} {value}" for name, value in card["options"].items())
    best = f", {card['monitor'] or 'figure'} {card['figure']:.4g}" if card["figure"] is not None else ""
    lines = [
        f"- task: {card['task']}" + (f" ({options})" if options else ""),
        f"- checkpoint: {card['checkpoint']}, step {card['step']:,}{best}",
        f"- trained on: {card['data'] or 'unknown'}, in {card['precision']}",
    ]
    if left_out := card.get("left_out"):
        lines.append(f"- trained without {first_few(left_out)}, whose records in the cache were damaged")
    if killed := card.get("killed"):
        lines.append(f"- trained without {first_few(killed)}, on which its process died")
    if weights := card.get("weights"):
        lines.append(f"- weights: {weights['parameters']:,} numbers, digest {weights['digest']}")
    if card["encoder"]:
        several = "encoder 1" in card["encoder"]
        encoders = card["encoder"] if several else {"encoder": card["encoder"]}
        lines += [
            f"- {title}: " + ", ".join(f"{name} {value}" for name, value in plain.items())
            for title, plain in encoders.items()
        ]
    for made in card["evaluations"]:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in made["figures"].items() if value is not None)
        lines.append(f"- {made['split'] or 'all items'} ({made['items']:,} items, step {made['step']:,}): {figures}")
    lines += [
        f"- evaluations/{name}: cannot be read: damaged, or of another version" for name in card.get("unreadable", ())
    ]
    return lines
