"""Events of people and their schedulers: cancels, requeues, lost supervisors, leaks, tiny tasks, double submits."""

from __future__ import annotations

import json
import os
import subprocess

from pipeline.journal.run_folder import runs_in
from pipeline.journal.run_status import State
from tests.testkit.cluster.cluster import SEARCH_PATH
from tests.testkit.slurm_runs import DIES, PIPELINE, Run, make_project, until
from tests.weeks.scene import ENDS, WAITS_S, Scene, must

LEAK_BYTES = 60 << 20


def supervisor_vanishes(scene: Scene) -> None:
    """The job that waits to look after a run is cancelled: it is said, and `resume` brings the run to its end."""
    run = scene.held()
    until("it alone", lambda: len(run.jobs(scene.cluster, "supervise")) == 1, WAITS_S, run.story)
    scene.slurm("scancel", *{row["job"] for row in run.jobs(scene.cluster, "supervise")})
    until("nobody", lambda: run.now().state is State.ABANDONED, WAITS_S, run.story)
    scene.says(scene.told(run), "orphaned", f"pipeline resume {run.name}")
    if scene.rng.random() < 0.5:
        scene.lets_go(run)
        until("no job", lambda: not run.jobs(scene.cluster), WAITS_S, run.story)
    resumed = scene.types(run.project, "resume", run.name)
    must(resumed.code == 0, "resume failed", lambda: resumed.said)
    scene.lets_go(run)
    scene.ends(scene.follows(run.project.newest))
    scene.trained(run)


def visits_die(scene: Scene) -> None:
    """Visits of a supervisor are killed, cancelled or requeued at their work: the next ones finish the run."""
    run = scene.held()
    scene.lets_go(run)
    for _ in range(2):
        how = scene.rng.choice((["scancel"], ["scancel", "--full", "--signal=KILL"], ["scontrol", "requeue"]))
        until("a visit, or the end", lambda how=how: _ends_a_visit(scene, run, *how), WAITS_S, run.story)
    scene.ends(run)
    scene.trained(run)


def _ends_a_visit(scene: Scene, run: Run, *how: str) -> bool:
    """End a visit that is at work, if there is one; tell whether it was ended, or the run has ended."""
    visits = _visits(scene, run)
    for visit in visits:
        scene.cluster.run(*how, visit)
    until("their end", lambda: not {*visits} & {*_visits(scene, run)}, WAITS_S, run.story)
    return bool(visits) or run.now().state in ENDS


def _visits(scene: Scene, run: Run) -> list[str]:
    """Return the jobs of visits that are at work."""
    return [row["job"] for row in run.jobs(scene.cluster, "supervise") if row["state"] == "RUNNING"]


def task_leaks(scene: Scene) -> None:
    """Memory grows with every step, above what was asked for: it goes on with more, and the leak is named."""
    project = scene.project(leak_bytes=LEAK_BYTES)
    run = scene.trains(project)
    told = scene.ends(run)
    scene.says(told, "host_oom", "retry with [0-9.]+ ?[MG]", "leak|grows")
    scene.trained(run)


def tiny_tasks_fail(scene: Scene) -> None:
    """Many tiny tasks, of which one in twenty dies of its item: those are left out, named, and all others done."""
    tasks = scene.rng.choice((60, 300))
    names = [f"c{number}" for number in range(tasks)]
    bad = sorted(scene.rng.sample(names, tasks // 20))
    settings = {"cluster__scan__items_per_task": 1, "data__max_rejected_fraction": 0.06}
    project = make_project(scene.folder / "project", tasks, {f"{name}.pdb": DIES for name in bad}, **settings)
    run = scene.submits(project, "scan")
    told = scene.ends(run)
    must(run.stage("scan")["census"]["accepted"] == tasks - len(bad), "an item is missing", run.story)
    named = sorted(json.loads(line)["id"] for line in run.folder.rejected.read_text().splitlines())
    must(named == bad, f"left out: {named}, but {bad} died")
    scene.says(told, f"{len(bad)} rejected", "killed_its_task")


def giant_file_comes(scene: Scene) -> None:
    """Somebody puts a file of gigantic size among the data: it is rejected by name, and all others are done."""
    settings = {"data__max_rejected_fraction": 0.2, "cluster__scan__items_per_task": 2}
    project = make_project(scene.folder / "project", 6, **settings)
    with (project.folder / "data" / "giant.pdb").open("wb") as file:
        file.truncate(scene.rng.randrange(2 << 20, 1 << 40))
    run = scene.submits(project, "scan")
    scene.says(scene.ends(run), "1 rejected", "file_too_large +1 +giant")
    must(run.stage("scan")["census"]["accepted"] == 6, "an item is missing", run.story)


def submitted_twice_at_once(scene: Scene) -> None:
    """Two people type the same submission at the same time: one run does it, and the other is told so."""
    project = scene.project(step_s=0.1)
    words = [PIPELINE, "submit", "--stage", "train", "--executor", "slurm", *scene.settings(project)]
    known = {**os.environ, "PATH": f"{PIPELINE.parent}:{SEARCH_PATH}", "COLUMNS": "200"}
    before = {folder.name for folder in runs_in(project.folder / "runs")}
    typed = [
        subprocess.Popen(
            words, cwd=project.folder, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    said = [one.communicate(timeout=WAITS_S)[0] for one in typed]
    scene.heard += said
    runs = [Run(project, folder) for folder in runs_in(project.folder / "runs") if folder.name not in before]
    for run in runs:
        scene.follows(run)
    codes = sorted(one.returncode for one in typed)
    for run in runs:
        scene.ends(run, State.DONE, State.FAILED)
    must(len(runs) == 1 and codes[0] == 0, f"{len(runs)} runs; codes {codes}", lambda: "\n".join(said))
    must(any("already" in " ".join(one.split()) for one in said), "nobody was told", lambda: "\n".join(said))
    scene.trained(runs[0])


EVENTS = (supervisor_vanishes, visits_die, task_leaks, tiny_tasks_fail, giant_file_comes, submitted_twice_at_once)
