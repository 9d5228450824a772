"""`pipeline plan`, `pipeline find-batch`, and the output of `submit --dry-run` and `--emit`."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.explain_verb import GraphForm, WithGraph, show_graph
from pipeline.cli.help import alone, argument, option
from pipeline.cli.options import (
    ConfigFile,
    Json,
    Sets,
    Verbose,
    choice,
    completing,
    gpus,
    load_config,
    one_of,
    one_stage,
    print_json,
    refuse,
)
from pipeline.command_line import Command
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipeline.cluster.job_spec import Executor
    from pipeline.config.load import LoadedConfig
    from pipeline.engine.submission import Submission
    from pipeline.memory.outlook import TrainOutlook
    from pipeline.project.project import Project
    from pipeline.script.batch_finding import Try
    from pipeline.stages.jobs import StagePlan

NO_SLURM = "note: no Slurm answers here: the plan ignores the limits of the cluster"
UNPLANNED = (StageName.EVALUATE, StageName.PREDICT, StageName.REGENERATE)  # depend on a training or a damage list
PLANNED = (*(name for name in StageName if name not in UNPLANNED), "all")


PlannedStage = Annotated[
    str | None,
    argument(
        "STAGE",
        f"Stage to plan, with those it needs (train: alone): {', '.join(PLANNED)}. Default: all.",
        **choice(PLANNED),
    ),
]
StageOption = Annotated[str | None, one_of(PLANNED, "--stage", "The same as STAGE.", hidden=True)]
Gpus = Annotated[
    list[str] | None,
    option(
        "--gpu GPU",
        "Plan for this GPU: a100-80gb, 24GiB, 3xa100-40gb, or a,b for a job that may get either. Several are compared.",
        autocompletion=completing(gpus),
    ),
]
Sizes = Annotated[
    str | None,
    option(
        "--sizes NAME=N,...",
        "Plan training for items of these sizes instead of your data, such as nodes=300,edges=6000. "
        "The names are those that the task's cost() receives; items=N sets the number of items.",
    ),
]
Probe = Annotated[
    bool, option("--probe", "Run the largest micro-batch on each GPU for some minutes and correct the plan.")
]


def plan_command(
    stage: PlannedStage = None,
    gpu: Gpus = None,
    sizes: Sizes = None,
    probe: Probe = False,
    graph: GraphForm = None,
    verbose: Verbose = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
    stage_option: StageOption = None,
) -> None:
    """Estimate the memory, time and disk of stages before you submit.

    The plan of train includes GPU memory; making it needs no GPU.

    Examples:
    pipeline plan                           # memory, time and disk of each stage
    pipeline plan train --gpu a100-80gb --gpu h100-80gb-sxm
    pipeline plan --dag                     # which stages are done, and why not
    """
    from pipeline.cluster.job_spec import Limits
    from pipeline.dataset.early_items import typed_sizes
    from pipeline.errors import PlanInfeasible
    from pipeline.project.project import Project, open_executor
    from pipeline.report import tables

    stage = one_stage("plan", stage, stage_option)
    loaded = load_config(config, sets)
    of_training = [name for name, given in (("--gpu", gpu), ("--probe", probe), ("--sizes", sizes)) if given]
    if of_training and graph is not None:
        refuse(f"{of_training[0]} and --dag cannot be combined", "pipeline plan", Command.of("plan --dag"))
    if of_training and stage != "train":
        refuse(f"{of_training[0]} requires the stage train, not {stage}", "pipeline plan", Command.of("plan train"))
    with open_executor(loaded.config) as executor:
        project = Project.open(loaded.config, remember=False, strict=True, beside=loaded.base_dir.absolute())
        if graph is not None:
            show_graph(stage, project, graph, as_json=as_json)
            return
        if stage == "train" and loaded.config.train.command is not None:
            _show_script(project, executor, traced=of_training, as_json=as_json)
            return
        if loaded.config.cluster.executor == "slurm" and executor.limits_of() == Limits():
            typer.echo(NO_SLURM, err=True)
        if stage == "train":
            try:
                asked = {"gpus": gpu or (), "sizes": typed_sizes(sizes) if sizes is not None else None}
                outlook = _training(loaded, project, executor, probing=probe, detailed=verbose or as_json, **asked)
            except PlanInfeasible as error:
                if as_json:
                    raise
                error.in_project(Command.typed(sys.argv[1:]))
                place = f"{error.where}: " if error.where else ""
                answer = (f"✗ Does not fit {gpu[0] if gpu else 'in memory'}", f"  Why  {place}{error.what}")
                tables.show_parts(*answer, f"  Fix  {error.remedy}", columns=tables.MESSAGE)
                raise typer.Exit(error.exit_code) from None
            _show_training(project, executor, outlook, as_json=as_json, verbose=verbose)
        else:
            _show_stages(stage, loaded, project, executor, as_json=as_json, verbose=verbose)


plan = alone("plan", plan_command, WithGraph)


def _show_stages(
    stage: str, loaded: LoadedConfig, project: Project, executor: Executor, *, as_json: bool, verbose: bool
) -> None:
    """Print the expected resources of a stage and those it needs."""
    from pipeline.errors import PipelineError
    from pipeline.report import tables
    from pipeline.report.plan_tables import stages_report
    from pipeline.stages import table
    from pipeline.stages.jobs import job_of, plan_stage
    from pipeline.views.efficiency import estimates

    plans: list[StagePlan] = []
    notes = [table.untrained(stage, project.config)]
    for name in table.up_to(stage, project.config):
        if as_json and table.STAGES[name].together:
            continue
        try:
            plan = plan_stage(project, table.stage(name, project.config), executor, folder=None)
        except PipelineError as error:
            if not table.STAGES[name].together:
                raise
            notes.append(f"{name}: {error}")
            continue
        if project.config.cluster.executor == "local":  # the cluster is asked at submission
            executor.check(job_of(None, project.config, plan.job))
        plans.append(plan)
    planned = estimates(project, plans, executor, loaded.origins)
    if as_json:
        print_json([asdict(estimate) for estimate in planned])
        return
    waits = any(stage.stage == "train" and stage.counts.get("unplanned") for stage in planned)
    later = {"train": _early_plan(loaded, project, executor)} if waits else {}
    report = stages_report(planned, later, verbose=verbose)
    tables.show_parts(*report, *filter(None, notes), columns=tables.MESSAGE)
    if not verbose and any(plan.survey.shards for plan in plans):
        typer.echo("Where the numbers come from: -v")


def _early_plan(loaded: LoadedConfig, project: Project, executor: Executor) -> str:
    """Describe the plan of training by the sizes of a scan, or why there is none yet."""
    from pipeline.errors import PipelineError
    from pipeline.report.plan_tables import training_answer

    try:
        outlook = _training(loaded, project, executor)
    except PipelineError as error:
        error.in_project(Command.typed(sys.argv[1:]))
        return f"cannot be planned yet: {error.what}\n  next: {error.remedy}"
    return "\n".join(training_answer(outlook))


def _show_script(project: Project, executor: Executor, *, traced: Sequence[str], as_json: bool) -> None:
    """Print the plan of a training by a user's own script, which cannot be traced."""
    from pipeline.stages.jobs import script_outline
    from pipeline.stages.script import ScriptStage, outline_lines

    if traced:
        first = Command.of("plan train", then="   (its first attempt)")
        refuse(f"{traced[0]} needs a task: the script of train.command cannot be traced", "pipeline plan", first)
    stage = ScriptStage()
    stage.inspect(project)
    outline = script_outline(project, stage, executor)
    if as_json:
        print_json([outline])
    else:
        typer.echo("\n".join(outline_lines(outline)))


def _training(
    loaded: LoadedConfig, project: Project, executor: Executor, *, probing: bool = False, **asked: Any
) -> TrainOutlook:
    """Plan training; `asked` has the options of the command."""
    from pipeline.planning.offers import Question
    from pipeline.planning.prepare import shown_plan

    place, say = loaded.base_dir.absolute(), partial(typer.echo, err=True)
    question = Question(loaded.config, project, executor, by_plan=True, beside=place, say=say, **asked)
    with _stdout_to_stderr():
        if not probing:
            return shown_plan(question)
        from pipeline.planning.training_outlook import plan_training

        return plan_training(question, probing=True)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect the output of user code and its child processes to stderr: stdout is for the plan."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show_training(
    project: Project, executor: Executor, outlook: TrainOutlook, *, as_json: bool, verbose: bool
) -> None:
    """Print the plan of a training, then raise the error of a failed probe, if any."""
    from pipeline.journal.attempts import Ask
    from pipeline.report import tables
    from pipeline.report.plan_tables import training_answer, training_report
    from pipeline.stages import table
    from pipeline.stages.jobs import place

    if as_json:
        print_json([outlook.to_json()])
    else:
        ask = Ask(outlook.mem.mem_bytes, outlook.time_s)
        where, why = place(project, table.stage("train", project.config), executor, ask)
        details = training_report(outlook) if verbose else []
        details += [f"partition {where}: {why}"] if verbose and where else []
        tables.show_parts(*training_answer(outlook, where, verbose=verbose), *details, columns=tables.MESSAGE)
    for probe in outlook.probed:
        if probe.error is not None:
            raise probe.error


def show_plan(submission: Submission, emit: Path | None) -> None:
    """Print the work of each stage and the scripts to submit, or write the scripts into the folder `emit`."""
    from pipeline.engine.lifecycle import scripts
    from pipeline.report import tables
    from pipeline.report.plan_tables import stages_report
    from pipeline.stages.jobs import script_outline
    from pipeline.stages.script import outline_lines
    from pipeline.store.format.disk import written_to
    from pipeline.units import format_bytes
    from pipeline.views.efficiency import estimates

    project, executor, plans = submission.project, submission.executor, submission.plans()
    tables.show_parts(*stages_report(estimates(project, plans, executor, {})), "")
    for plan in (part for whole in plans for part in whole.parts()):
        if plan.stage.is_script:
            typer.echo("\n".join(outline_lines(script_outline(project, plan.stage, executor))))
        elif plan.survey.shards and not plan.counts().get("unplanned"):
            typer.echo(f"{plan.title}: memory {plan.job.why}")
            if plan.job.shared:
                typer.echo(f"{plan.title}: trainings share: {plan.job.shared}   (train.sweep.per_gpu)")
            for name, shard in zip(plan.survey.names, plan.survey.shards, strict=True) if plan.own else ():
                mem = format_bytes(plan.own[name].ask.mem_bytes)
                typer.echo(f"  {name}: {mem}, {shard.end - shard.start:,} steps to do")
            if where := plan.job.ask.partition:
                typer.echo(f"{plan.title}: partition {where}: {plan.job.where}")
    if project.config.cluster.executor == "slurm":
        for name, text in scripts(project, plans, executor):
            if emit is None:
                typer.echo(f"\n# ---- {name}\n{text}")
                continue
            with written_to(emit / name, "--emit DIR"):
                emit.mkdir(parents=True, exist_ok=True)
                (emit / name).write_text(text)
            typer.echo(f"wrote {emit / name}")
        if emit is not None:
            typer.echo("RUN stands for the run folder that `pipeline submit` creates. To submit by hand, see sbatch/.")
    elif emit is not None:
        typer.echo("no scripts written: cluster.executor is local (add --executor slurm)", err=True)
    typer.echo(f"dry run: nothing submitted; to apply: {submission.typed}")


def find_batch_command(
    command: Annotated[list[str], argument("COMMAND", "Command that starts your script, with {micro_batch} in it.")],
    most: Annotated[int, option("--max", "Largest micro-batch to try.", min=1)],
    divides: Annotated[
        int | None, option("--divides", "Try only divisors of this number, such as a rank's share of a batch.", min=1)
    ] = None,
    steps: Annotated[int, option("--steps", "End a script that prints its steps after this many.", min=1)] = 3,
    seconds: Annotated[
        float | None, option("--seconds", "Count a size as fitting when the script has run this long.", min=0.1)
    ] = None,
    again: Annotated[bool, option("--again", "Search again although the result is remembered.")] = False,
    as_json: Json = False,
) -> None:
    """Find the largest micro-batch that fits your training script.

    All ranks of the script must run. The command of the script follows --.
    """
    from pipeline.records import RankPlace
    from pipeline.script.batch_finding import find_batch

    if RankPlace.by_slurm(os.environ):
        outside = "pipeline find-batch --max … -- srun … {micro_batch}"
        refuse("each rank of this srun would search on its own", "pipeline find-batch", outside)
    text = command[0] if len(command) == 1 else shlex.join(command)
    every = range(1, min(most, divides or most) + 1)
    sizes = every if divides is None else [size for size in every if divides % size == 0]

    def show(tried: Try) -> None:
        typer.echo(f"{tried.micro_batch:>8,}  {'fits' if tried.fits else tried.reason}", err=as_json)

    def waits(size: int) -> None:
        typer.echo(
            f'{size:>8,}  no line such as pipeline: {{"step": 1}} was printed yet; waiting until the script ends\n'
            "  next: print that line after each step   or   pipeline find-batch --seconds 60 …   (enough to fit)",
            err=True,
        )

    found, is_remembered = find_batch(text, sizes, steps=steps, seconds=seconds, again=again, on_try=show, waits=waits)
    words = [word.replace("{micro_batch}", str(found)) for word in command]
    use = words[0] if len(words) == 1 else shlex.join(words)
    if as_json:
        print_json({"micro_batch": found, "remembered": is_remembered, "command": use})
        return
    remembered = "   (remembered: --again tries again)" if is_remembered else ""
    typed = "" if "{" in use else f"{use}\n  or "  # only pipeline fills the other placeholders
    setting = f"train: {{micro_batch: {found}}}   (if it cannot accumulate: effective_batch)"
    typer.echo(f"largest micro-batch that fits: {found}{remembered}\n  next: {typed}in pipeline.yaml: {setting}")
