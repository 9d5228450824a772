"""Events of the cluster: what dies, is taken away, held, suspended, drained, preempted, or does not answer."""

from __future__ import annotations

import os
import signal
import time

from pipeline.journal.run_status import State
from tests.testkit.slurm_runs import Run, until
from tests.weeks.scene import STEPS, WAITS_S, Scene, must

AWAY_S = 3.0


def rank_is_killed(scene: Scene) -> None:
    """The kernel kills a training: it goes on from its last checkpoint, and the signal is named."""
    run = scene.held()
    os.kill(scene.process(run), signal.SIGKILL)
    scene.ends(run)
    scene.says(scene.types(run.project, "status", run.name).said, "SIGKILL|signal 9")
    scene.trained(run)


def node_daemon_dies(scene: Scene) -> None:
    """A node dies with the training on it: it begins again elsewhere."""
    run = scene.held()
    node = _node(scene, run)
    scene.cluster.kill_node(node)
    scene.ends(run)
    scene.cluster.revive_node(node)
    scene.trained(run)


def controller_is_away(scene: Scene) -> None:
    """The controller does not answer while a training ends: `status` says so, and the run ends when it is back."""
    run = scene.held()
    scene.cluster.stop_controller()
    told = scene.told(run)
    scene.lets_go(run)
    scene.says(told, "queue does not answer|squeue|scheduler")
    time.sleep(AWAY_S)
    scene.cluster.start_controller()
    scene.ends(run)
    scene.trained(run)


def accounting_is_away(scene: Scene) -> None:
    """No accounting answers for the whole of a run, in which a training is killed: the verdict is the same."""
    scene.cluster.stop_accounting()
    run = scene.held()
    os.kill(scene.process(run), signal.SIGKILL)
    scene.says(scene.ends(run), "SIGKILL|signal 9|killed|crashed")
    scene.trained(run)
    scene.cluster.start_accounting()


def user_cancels_and_resumes(scene: Scene) -> None:
    """Somebody types scancel for the job of a training: the run ends, says who it was, and goes on when asked."""
    run = scene.held()
    scene.slurm("scancel", scene.job(run))
    scene.says(scene.ends(run, State.FAILED), "cancelled by", "next: +pipeline submit")
    scene.ends(scene.goes_on(run))
    scene.trained(run)


def admin_requeues(scene: Scene) -> None:
    """An administrator requeues the job of a training, and holds it: that is said, and released it goes on."""
    run = scene.held()
    job, is_held = scene.job(run), scene.rng.random() < 0.5
    scene.slurm("scontrol", "requeuehold" if is_held else "requeue", job)
    if is_held:
        _waits(scene, run, "JobHeld|requeued in held state")
        scene.says(scene.told(run), "held", "scontrol release")
        scene.slurm("scontrol", "release", job)
    scene.ends(run)
    scene.trained(run)


def admin_suspends(scene: Scene) -> None:
    """A training is suspended for a while: `status` says so, and it goes on where it stood."""
    run = scene.held()
    job = scene.job(run)
    scene.slurm("scontrol", "suspend", job)
    time.sleep(AWAY_S)
    scene.says(scene.told(run), "suspended")
    scene.slurm("scontrol", "resume", job)
    scene.lets_go(run)
    scene.ends(run)
    scene.trained(run)


def node_is_drained(scene: Scene) -> None:
    """The node of a training is drained, and the training killed: it begins again elsewhere."""
    run = scene.held()
    node = _node(scene, run)
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=weeks")
    os.kill(scene.process(run), signal.SIGKILL)
    scene.ends(run)
    scene.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    scene.trained(run)


def limit_comes_in_mid_epoch(scene: Scene) -> None:
    """The time limit comes between two checkpoints: the training saves itself and goes on in the queue."""
    project = scene.project(step_s=3.0)
    run = scene.trains(project, cluster__train__time="2m")
    scene.ends(run)
    scene.trained(run)


def preempted_twice(scene: Scene) -> None:
    """A training is preempted, and again as soon as it is back: it goes on where it stopped, twice."""
    first = scene.rng.randrange(5, 13)
    steps = first, scene.rng.randrange(first + 1, STEPS - first)  # each start counts its own steps
    project = scene.project(holds=steps)
    run = scene.trains(project, cluster__train__partition="preempt")
    for step in steps:
        scene.arrives(run, step)
        node = _node(scene, run)
        words = ["--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=true"]
        scene.slurm("sbatch", *words)
        until("its job to be gone", lambda node=node: _node(scene, run) != node, WAITS_S, run.story)
    scene.ends(run)
    scene.trained(run)


def partition_is_down(scene: Scene) -> None:
    """The partition goes down before a training begins: `status` says why it waits."""
    project = scene.project()
    scene.slurm("scontrol", "update", "PartitionName=preempt", "State=DOWN")
    run = scene.trains(project, cluster__train__partition="preempt")
    _waits(scene, run, "PartitionDown")
    scene.says(scene.told(run), "PartitionDown|partition.{0,40}down")
    scene.slurm("scontrol", "update", "PartitionName=preempt", "State=UP")
    scene.ends(run)
    scene.trained(run)


def maintenance_is_reserved(scene: Scene) -> None:
    """All nodes are reserved before the longest task could end: `status` says what the training waits for."""
    project = scene.project()
    nodes = ",".join(scene.cluster.nodes)
    words = ("ReservationName=weeks", "StartTime=now+10minutes", "Duration=60", "Users=root", "Flags=MAINT,IGNORE_JOBS")
    scene.slurm("scontrol", "create", "reservation", *words, f"Nodes={nodes}")
    run = scene.trains(project, cluster__train__time="2h")
    _waits(scene, run, "ReqNodeNotAvail|Reserv")
    scene.says(scene.told(run), "reserv|maintenance")
    scene.slurm("scontrol", "delete", "ReservationName=weeks")
    scene.ends(run)
    scene.trained(run)


def quality_of_service_is_full(scene: Scene) -> None:
    """A quality of service takes no further job: the submission is refused in its words, and taken later."""
    project = scene.project()
    for _ in range(4):
        scene.slurm("sbatch", "--qos=tiny", "--hold", "--output=/dev/null", "--job-name=others", "--wrap=true")
    words = ("submit", "--stage", "train", "--executor", "slurm", *scene.settings(project, cluster__slurm__qos="tiny"))
    done = scene.types(project, *words)
    must(done.code == 6, f"it ended with {done.code}", lambda: done.said)
    scene.says(done.said, "QOSMaxSubmitJobPerUserLimit", "next:")
    scene.slurm("scancel", "--name=others")
    run = scene.submits(project, "train", *scene.settings(project))
    scene.ends(run)
    scene.trained(run)


def clocks_are_apart(scene: Scene) -> None:
    """The nodes' clocks are minutes away from the submitting machine's: nothing depends on it."""
    apart_s = scene.rng.choice((-600, -40, 40, 600))
    run = scene.held(apart_s=apart_s)
    os.kill(scene.process(run), signal.SIGKILL)
    told = scene.ends(run)
    must("in -" not in told, "a time is negative", lambda: told)
    scene.trained(run)


def _node(scene: Scene, run: Run) -> str:
    """Return the node of a training; empty while it has none."""
    nodes = [row["node"] for row in run.jobs(scene.cluster, "train") if row["state"] == "RUNNING"]
    return nodes[0] if nodes else ""


def _waits(scene: Scene, run: Run, reason: str) -> None:
    """Wait until a job of a training waits in the queue, for a reason."""

    def is_so() -> bool:
        jobs = [row["array"] for row in run.jobs(scene.cluster, "train")]
        listed = scene.cluster.run("squeue", "-h", "-o", "%T %r", "-j", ",".join(jobs)).stdout if jobs else ""
        # While a job that was requeued still ends, Slurm says already for what it will wait.
        waiting = [line for line in listed.splitlines() if line.startswith("PENDING")]
        return any(word in line for line in waiting for word in reason.split("|"))

    until(f"a job that waits for {reason}", is_so, WAITS_S, run.story)


EVENTS = (
    rank_is_killed,
    node_daemon_dies,
    controller_is_away,
    accounting_is_away,
    user_cancels_and_resumes,
    admin_requeues,
    admin_suspends,
    node_is_drained,
    limit_comes_in_mid_epoch,
    preempted_twice,
    partition_is_down,
    maintenance_is_reserved,
    quality_of_service_is_full,
    clocks_are_apart,
)
