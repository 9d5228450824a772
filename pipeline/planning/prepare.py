"""Prepares a training: its recipe (everything that decides its outcome) and its plan, made once and remembered.

A training may continue with changed code if a user accepts it: the model's folder records the digests of accepted code
with their times (`accepted_code.json`).
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.cluster.job_spec import Request
from pipeline.codec import memo, recall, remember
from pipeline.command_line import Command
from pipeline.config.schema_train import TrainSection
from pipeline.dataset.early_items import naming_sizes
from pipeline.dataset.loading import batches_of, made_table
from pipeline.dataset.reader_items import is_reader
from pipeline.dataset.reader_items import refuse_unreadable as inspect_entries
from pipeline.device.kinds import SETTINGS
from pipeline.errors import CacheDamaged, ConfigError, DataError, RecordMissing, WeightsUnusable
from pipeline.files import read_json, write_whole
from pipeline.journal.run_folder import writing_run
from pipeline.keys import content_digest
from pipeline.memory.history import torch_version
from pipeline.memory.planning.memory_plan import weakest
from pipeline.planning.sampled_items import with_draws
from pipeline.planning.task_contract import GRAPH
from pipeline.planning.training_work import Work, costs_of
from pipeline.project.project import once
from pipeline.project.run_code import package_digest
from pipeline.project.user_code import TaskCode, plans_folder, task_code
from pipeline.structures.sources.source_rows import cannot_open
from pipeline.training.items.item_source import NUMBERS
from pipeline.training.items.item_table import ItemTable
from pipeline.training.prepared import ModelFolder, Prepared, likeness, phase_plan
from pipeline.training.sampling import narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.config.schema import Config
    from pipeline.memory.outlook import TrainOutlook
    from pipeline.planning.offers import Question
    from pipeline.project.project import Project
    from pipeline.protocol import Task
    from pipeline.training.loop.train import Items
    from pipeline.training.prepared import PhasePlan

    Keep = Callable[[ItemTable], ItemTable]  # returns what is wanted of a page of a table

NAME_DIGITS = 8
PLAN = "plan"  # of remembered plans
FLAG = "--accept-code"
FEW_ITEMS = 3  # items that a task is tried with
# Settings that decide the results; those that only decide speed, memory or reports are missing.
DECISIVE = (
    "task", "options", "split", "effective_batch", "batching", "seed", "optimizer", "learning_rate", "weight_decay",
    "clip", "ema", "frozen", "curriculum", "oversize", "pretrained_partial",
)  # fmt: skip

UNPLANNED = {  # or represented in a plan by what follows from them
    "preset", "validation", "checkpoints", "log_every", "trackers", "models", "evaluate", "predict", "embeddings",
    "sweep",
}  # fmt: skip


def prepare(project: Project) -> Prepared | None:
    """Plan the configured training, or return its known plan; None while its graphs or files are missing."""
    if (table := _table_to_train_on(project)) is None:
        return None
    return with_accepted_code(_prepared(project, table), project.config.train.models)


def known_plan(project: Project) -> Prepared | None:
    """Return the plan if it was made before."""
    if (table := _table_to_train_on(project)) is None:
        return None
    known = _prepared.known(project, table)
    known = known or recall(plans_folder(project.config), PLAN, _asked(project, table), Prepared)
    return known and with_accepted_code(known, project.config.train.models)


@once
def _prepared(project: Project, table: str) -> Prepared:
    make = partial(_planned, project, table)
    return memo(plans_folder(project.config), PLAN, _asked(project, table), make, Prepared)


def has_input(project: Project) -> bool:
    """Tell whether the input of a training is there."""
    return _table_to_train_on(project) is not None


def plan_asked(project: Project) -> Mapping[str, Any]:
    """Return everything that a plan follows from; None without input."""
    return _asked(project, _table_to_train_on(project) or "")


def _table_to_train_on(project: Project) -> str | None:
    """Return the key of the table of items; None while graphs, or files that the task reads, are missing."""
    table = made_table(project)
    return table if table is not None and all(path.exists() for path in code_of(project).reads) else None


@once
def _asked(project: Project, table: str) -> Mapping[str, Any]:
    return {**plan_facts(project, table), "embeddings": embeddings_used(project)}


def plan_facts(project: Project, table: str) -> dict[str, Any]:
    """Return the facts that a plan's memory and time follow from."""
    config = project.config
    asked: dict[str, Any] = {
        "train": config.train.model_dump(mode="json", exclude=UNPLANNED),
        "resources": config.cluster.train.model_dump(mode="json", exclude={"time", "partition", "constraint"}),
        "cards": [card.model_dump(mode="json") for card in config.cluster.slurm.cards],
        "executor": config.cluster.executor,
        "slots": config.cluster.slots.model_dump(mode="json") if config.cluster.executor != "slurm" else None,
        "task": code_of(project).weights_digest,
        "table": table,
        "code": package_digest(),
        "torch": torch_version(),
    }
    if (share := config.train.sweep.share) > 1:
        asked["share"] = share
    if (pretrained := pretrained_digest(project)) is not None:
        asked["pretrained"] = pretrained
    if sampling := _sampling_of(project):
        asked["sampling"] = sampling
    if files := files_digests(project):
        asked["files"] = files
    return asked


def _planned(project: Project, table: str) -> Prepared:
    """Plan a training."""
    project.config.cluster.runs.mkdir(parents=True, exist_ok=True)
    from pipeline.planning.offers import Question
    from pipeline.planning.training_outlook import plan_training

    with project.open_executor() as executor:
        question = Question(config=project.config, project=project, executor=executor, beside=project.beside)
        outlook = plan_training(question)
    train, plan, card = project.config.train, outlook.plan, weakest(outlook.offer.cards)
    stages = train.stages
    last_epochs = train.epochs - sum(stage.epochs for stage in stages.values())
    phases = tuple(
        phase_plan(
            name,
            stages[name].epochs if name in stages else last_epochs,
            stage_plan,
            ahead_bytes=outlook.ahead_bytes[name],
            kept=outlook.kept[name],
            **({"largest": stages[name].largest, "smallest": stages[name].smallest} if name in stages else {}),
        )
        for name, stage_plan in outlook.plans.items()
    )
    skipped = tuple(oversize.item for oversize in plan.oversize) if train.oversize == "skip" else ()
    recipe = recipe_of(project, table, plan.choice.precision)
    if plan.crop or skipped:  # another plan would train on other items
        recipe |= {"crop": dict(plan.crop), "skipped": sorted(skipped)}
    return Prepared(
        name=training_name(train.task or "", recipe),
        recipe=recipe,
        table=table,
        precision=plan.choice.precision,
        checkpointing=plan.choice.checkpointing,
        offload=plan.choice.offload,
        sharded=plan.choice.shards > 1,
        phases=phases,
        limit_bytes=plan.limit_bytes,
        margin=plan.margin.factor - 1,
        ranks=plan.request.ranks,
        cpus=project.config.cluster.train.cpus,
        mem_bytes=outlook.mem.mem_bytes,
        mem_why=outlook.mem.why,
        allocator=plan.allocator.settings,
        heap_bytes=outlook.host.kept_bytes,
        step_s=plan.step_s.value,
        workspace_bytes=card.workspace_bytes,
        process_bytes=card.process_bytes,
        remedies=plan.remedies,
        crop=plan.crop,
        skipped=skipped,
        notes=plan.notes,
    )


def with_accepted_code(prepared: Prepared, models: Path) -> Prepared:
    """Return the plan of the training for which this code was accepted, if any, else the plan unchanged."""
    code = prepared.recipe["code"]
    for folder, recipe in _alike(prepared, models):
        if code in {entry["code"] for entry in read_json(folder.accepted_code) or ()}:
            return replace(prepared, name=folder.path.name, recipe=recipe)
    return prepared


def accept_code(prepared: Prepared, models: Path) -> str:
    """Record that the newest training that differs only in its code goes on with this code; return its name."""
    code = prepared.recipe["code"]
    others = [folder for folder, recipe in _alike(prepared, models) if recipe["code"] != code]
    newest = max(others, key=lambda folder: folder.prepared.stat().st_mtime, default=None)
    if newest is None:
        what = "there is no training that differs from this one in nothing but its code"
        raise ConfigError(what, where=FLAG, remedy=Command.of("submit train", then="   (says what changed)"))
    entry = {"code": code, "at": datetime.now(UTC).isoformat(timespec="seconds"), "why": f"accepted with {FLAG}"}
    with writing_run(newest.path, "train.models"):
        write_whole(newest.accepted_code, json.dumps([*(read_json(newest.accepted_code) or ()), entry], indent=1))
    return newest.path.name


def _alike(prepared: Prepared, models: Path) -> Iterator[tuple[ModelFolder, dict[str, Any]]]:
    """Yield the trainings whose recipes differ from this one's at most in the code."""
    mine = _without_code(json.loads(json.dumps(prepared.recipe)))
    for path in sorted(models.glob(f"{prepared.name.rpartition('-')[0]}-*/prepared.json")):
        with suppress(OSError, ValueError, KeyError):  # it is being written, or of another version
            recipe = json.loads(path.read_text())["recipe"]
            if _without_code(recipe) == mine:
                yield ModelFolder(path.parent), recipe


def _without_code(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name != "code"}


def shown_plan(question: Question) -> TrainOutlook:
    """Return the cached plan of a training, or make and keep it."""
    from pipeline.memory.outlook import TrainOutlook

    table: str | None = f"typed: {dict(question.sizes or {})}"
    if not question.sizes:  # a plan from sizes of a scan alone is not kept
        with naming_sizes(question.config):
            table = made_table(question.project)
    asked = _asked_of_shown(question, table) if table else {}
    folder = plans_folder(question.config)
    if asked and (known := recall(folder, "shown plan", asked, TrainOutlook)) is not None:
        question.say("using the cached plan: its inputs have not changed")
        return known
    from pipeline.planning.training_outlook import plan_training

    outlook = plan_training(question)
    if asked and not outlook.waits_s:  # queue times change from minute to minute
        remember(folder, "shown plan", asked, outlook)
    return outlook


def _asked_of_shown(question: Question, table: str) -> dict[str, Any]:
    """Return everything that a shown plan follows from: its facts, its offers, and the measurements so far."""
    config, resources = question.config, question.config.cluster.train
    history = sorted((config.cluster.runs / ".profiles").rglob("*.jsonl"))
    limits = ""  # the free memory of this machine changes from minute to minute
    if config.cluster.executor == "slurm" and not (question.gpus or resources.gpus):
        limits = repr(question.executor.limits_of(Request.of(resources)))
    return {
        **plan_facts(question.project, table),
        "gpus": list(question.gpus),
        "cluster": config.cluster.model_dump(mode="json"),
        "limits": limits,
        "detailed": question.detailed,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        "measured": [(path.name, path.stat().st_size) for path in history],
    }


def recipe_of(project: Project, table: str, precision: str) -> dict[str, Any]:
    """Return everything that decides the outcome of a training, as JSON data."""
    train = project.config.train
    decided = train.model_dump(mode="json", include=set(DECISIVE))
    for stage in decided["curriculum"]:
        if "options" in stage:
            stage["options"] = pathless(stage["options"])
    constant = train.schedule.kind == "constant"
    reading = train.model_dump(mode="json", include={"pretrained_as", "pretrained_map", "pretrained_entry"})
    reading = {name: value for name, value in reading.items() if value}
    sampling = {"sampling": sampled} if (sampled := _sampling_of(project)) else {}
    return {
        **decided,
        **sampling,
        "options": pathless(train.options),
        "precision": precision,
        "schedule": train.schedule.model_dump(mode="json"),
        "epochs": None if constant and not train.curriculum else train.epochs,  # more epochs only extend the training
        "pretrained": pretrained_digest(project),
        "code": code_of(project).weights_digest,
        "embeddings": embeddings_used(project),
        "table": table,
        **({"files": files} if (files := files_digests(project)) else {}),
        **({"pretrained_reading": reading} if reading else {}),
    }


@once
def _sampling_of(project: Project) -> dict[str, Any]:
    """Return the settings by which an epoch draws items, with the digest of their table; empty if it draws all."""
    sampling = project.config.train.sampling
    if not sampling.is_used:
        return {}
    table = {} if sampling.table is None else {"table": digest_of_files(sampling.table)}
    return sampling.model_dump(mode="json", exclude={"table"}) | table


def pathless(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with paths reduced to file names: the content counts, not the place."""
    plain = json.loads(json.dumps(dict(options)))
    return {
        name: Path(value).name if isinstance(value, str) and value.startswith("/") else value
        for name, value in plain.items()
    }


@once
def files_digests(project: Project) -> list[str]:
    """Return the digests of the content of the files that the task reads."""
    return [digest_of_files(path) for path in code_of(project).reads]


@once
def pretrained_digest(project: Project) -> str | None:
    """Return the digest of the pretrained weights' content; None if none are configured."""
    path = project.config.train.pretrained
    return None if path is None else digest_of_files(path)


def digest_of_files(path: Path) -> str:
    """Return the digest of a file, or of the names and content of a folder's files; raise for unreadable ones."""
    try:
        return _digest_of_files(path)
    except OSError as error:
        raise cannot_open(path, error, "file") from error


def _digest_of_files(path: Path) -> str:
    from pipeline.training.checkpoints.sealed_folder import MANIFEST

    digest = xxhash.xxh3_128()
    manifest = path / MANIFEST  # the manifest of our checkpoints has the digests of the other files
    files = [manifest] if manifest.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for part in files if path.is_dir() else [path]:
        if path.is_dir():
            digest.update(f"{part.relative_to(path)}\0{part.stat().st_size}\0".encode())
        with part.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def training_name(task: str, recipe: Mapping[str, Any]) -> str:
    """Return the name of the folder of a training."""
    digest = content_digest(json.dumps(recipe, sort_keys=True).encode()).hex()
    return f"{task.rpartition(':')[2].lower()}-{digest[:NAME_DIGITS]}"


@once
def code_of(project: Project) -> TaskCode:
    """Return the facts about the user's task."""
    return task_code(project.config, project.beside)


def embeddings_used(project: Project) -> Mapping[str, Any]:
    """Return the recipe of the embeddings that a batch carries; empty for a reader's items.

    It leaves out `cls`, because the rows of residues do not depend on it.
    """
    if is_reader(project.config):
        return {}
    recipes = [replace(view.encoding.recipe, cls=False) for view in project.encoders_read]
    plain = [recipe.plain(recipe.wanted(0)) for recipe in recipes]
    return plain[0] if len(plain) == 1 else {"joined": plain}


def folder_of(project: Project, prepared: Prepared) -> ModelFolder:
    """Return the folder of a training."""
    return ModelFolder(project.config.train.models / prepared.name)


def items_of(project: Project, table: str, split: str | None, keep: Keep = lambda page: page) -> ItemTable:
    """Return the items of a split; all items if the data set has no splits and none was named."""
    if split is not None and split in (chosen := items_in(project, table, split, keep)).splits:
        return chosen
    is_whole = split is None or (split == TrainSection.model_fields["split"].default and not any(chosen.splits))
    whole = ItemTable.read(project.cache.kind("sets"), bytes.fromhex(table), keep)
    return whole if is_whole else whole.of_split(split or "", "train.split")


def items_in(project: Project, table: str, split: str, keep: Keep = lambda page: page) -> ItemTable:
    """Return the items of a split, of which there may be none."""
    return ItemTable.read(project.cache.kind("sets"), bytes.fromhex(table), lambda page: keep(page.in_split(split)))


def with_task(config: Config) -> bool:
    """Tell whether the configuration trains a task."""
    return config.train.task is not None or config.train.command is not None


def trained_table(project: Project, prepared: Prepared) -> ItemTable:
    """Return the items that are trained on; their sizes are the task's, cropped as planned."""
    train = project.config.train
    if _sampling_of(project) != prepared.recipe.get("sampling", {}):
        what = "changed since this training was planned: its epochs would draw other items"
        undo = Command.submit("train", then="   (a new training), or restore the table")
        raise DataError(what, where=str(train.sampling.table or "train.sampling"), remedy=undo)
    keep = partial(sized, Work.of(project.config, beside=project.beside).task, prepared)
    table = with_draws(items_of(project, prepared.table, train.split, keep), train.sampling)
    if prepared.skipped:
        table = table.take(np.setdiff1d(np.arange(len(table)), np.array(prepared.skipped, np.int64)))
    return table


def tables_of(project: Project, prepared: Prepared) -> list[ItemTable]:
    """Return all items that are read in a training."""
    validation = validation_items(project, prepared)
    return [trained_table(project, prepared), *([validation.table] if validation else [])]


def sized(task: Task, prepared: Prepared, table: ItemTable) -> ItemTable:
    """Return items with the sizes that the task's `cost` gives, cropped as planned."""
    sizes = costs_of(task, table.sizes) if len(table) else {}
    crop = ((name, np.int64(most)) for name, most in prepared.crop.items() if name in sizes)
    return replace(table, sizes=sizes | {name: narrow(np.minimum(sizes[name], most)) for name, most in crop})


def steps_of(project: Project, prepared: Prepared) -> int:
    """Return how many steps a training has in all."""
    table, batch = trained_table(project, prepared), project.config.train.effective_batch
    return sum(-(-phase_items(table, phase).table.in_epoch // batch) * phase.epochs for phase in prepared.phases)


def phase_items(table: ItemTable, phase: PhasePlan) -> Items:
    """Return the items of a phase and what they cost."""
    is_kept_N = phase.keeps(table.sizes)
    return _costed(table if is_kept_N.all() else table.take(np.flatnonzero(is_kept_N)), phase)


def validation_items(project: Project, prepared: Prepared) -> Items | None:
    """Return the items of validations during training, the same each time, or None."""
    settings = project.config.train.validation
    if settings.split is None:
        return None
    table = items_in(project, prepared.table, settings.split)
    if settings.split not in table.splits:
        return None
    return evaluated_items(project, prepared, table, taken_of(settings.limit, len(table)))


def taken_of(limit: int | float | None, items: int) -> int | None:
    """Return the number of items within a limit; a fraction is rounded up."""
    return math.ceil(limit * items) if isinstance(limit, float) else limit


def evaluated_items(project: Project, prepared: Prepared, table: ItemTable, limit: int | None = None) -> Items:
    """Return at most `limit` items and their costs under the plan of the last phase."""
    if limit is not None and limit < len(table):
        chosen = np.random.default_rng(project.config.train.seed).choice(len(table), limit, replace=False)
        table = table.take(np.sort(chosen))
    return _costed(sized(Work.of(project.config, beside=project.beside).task, prepared, table), prepared.phases[-1])


def _costed(table: ItemTable, phase: PhasePlan) -> Items:
    """Return items and their costs in a phase; their sizes are dropped to save memory."""
    from pipeline.training.loop.train import Items

    return Items(replace(table, sizes={}), phase.cost(table.sizes), likeness(table.sizes))


def size_names(project: Project) -> list[str]:
    """Return the names of the item sizes that the task's `cost` is given: a graph's, or a reader's first items'."""
    if not is_reader(project.config):
        return list(GRAPH)
    first = inspect_entries(project)
    if not len(first.table):
        what = f"none of the first {first.entries} items can be used"
        raise DataError(what, where=str(project.config.data.path), remedy=Command.submit("scan", then="   (says why)"))
    return list(first.table.sizes)


def some_items(project: Project) -> list[Any]:
    """Return a few small items as a task gets them; none while their graphs are not there."""
    key = made_table(project)
    if key is None:
        return []
    table = items_of(project, key, None)
    by = "nodes" if "nodes" in table.sizes else NUMBERS
    table = table.take(np.argsort(table.sizes[by], kind="stable")[:FEW_ITEMS])
    try:
        return list(batches_of(project, table)(range(len(table))).items)
    except (CacheDamaged, RecordMissing, WeightsUnusable):  # it may be tried later: the plan does not need them
        return []
