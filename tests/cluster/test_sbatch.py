"""What a job looks like as a script, and what bash makes of it.

`python -m tests.cluster.test_sbatch` renews the golden files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cluster import sbatch
from pipeline.cluster.job_spec import TASK, Job
from pipeline.config.load import read_config
from pipeline.config.schema_cluster import ContainerSection, SlurmSection
from pipeline.errors import ConfigError, SubmissionRefused
from tests.cluster.programs import job_of

GOLDEN = Path(__file__).parent / "golden"
STAGES = ("scan", "embed", "graph", "validate")
OF_RANKS = ("train", "evaluate", "predict")
PLAIN = job_of("scan", ("python", "-c", "work", "RUN", "scan", TASK), tasks=range(12), log_dir="/runs/one/logs")
RICH = job_of(
    name="embed",
    argv=("/opt/my env/bin/python", "-c", 'print("it\'s")\n', "/runs/50% of it", "embed", TASK),
    tasks=[1003, 1004, 1005, 1009],
    log_dir='/runs/50% of "it"/logs',
    cpus=8,
    gpus=2,
    mem_bytes=(48 << 30) + 1,
    time_s=5_430,
    after_any=("18", "19"),
    env={"LANG": "C.UTF-8", "HOSTILE": "$(id) `id` 'quoted'"},
    max_parallel=3,
    tag="embed-2026-1",
    card="a100",
    exclude=("n7", "n[9-12]"),
)
VISIT = job_of(
    "supervise", ("python", "-c", "visit", "RUN"), range(1), "/runs/one/logs", mem_bytes=1 << 30, after_any=("20",)
)
RANKS = job_of(
    name="train",
    argv=("python", "-c", "work", "RUN", "train", TASK),
    tasks=range(1),
    log_dir="/runs/one/logs",
    cpus=8,
    gpus=4,
    nodes=2,
    ranks=4,
    mem_bytes=96 << 30,
    time_s=86_400,
    tag="train-2026-1",
)
SITE = SlurmSection(
    partition="gpu,long",
    account="lab",
    qos="normal",
    constraint="a100|h100",
    options=("--exclusive=user", "--comment=two words"),
    setup=("module load cuda/12", 'export CONDA="$HOME/conda"'),
    scratch="/scratch/$USER/it's here",
)
CONTAINER = ContainerSection(
    image="/images/of it/pipeline.sif",
    binds=("$SCRATCH/in:/in:ro", "/data"),
    env={"GREETING": "it's $HOME"},
    options=("--contain",),
)
CONTAINED = replace(RICH, argv=(sys.executable, *RICH.argv[1:]), sees=("/runs/50% of it", "/home/me"))
RENDERED = {
    "scan.sbatch": lambda: sbatch.render(sbatch.template("scan"), PLAIN, SlurmSection()),
    "embed.sbatch": lambda: sbatch.render(sbatch.template("embed"), RICH, SITE, highest_task=1000),
    "contained.sbatch": lambda: sbatch.render(
        sbatch.template("embed"), CONTAINED, SITE.model_copy(update={"container": CONTAINER})
    ),
    "train.sbatch": lambda: sbatch.render(sbatch.template("train"), RANKS, SITE),
    "supervise.sbatch": lambda: sbatch.render(sbatch.template("supervise"), VISIT, SITE),
}
TEXTS = st.lists(st.binary(max_size=12).map(lambda text: os.fsdecode(text.replace(b"\0", b""))), max_size=5)
NOISE = st.lists(st.text(st.sampled_from("ab \n\r\t'\"\\$`!#*?[]{}()<>|&;~=%Å蛋\x7f-"), max_size=12), max_size=5)


@dataclass
class Node:
    """A folder that stands for a compute node, where Slurm's commands only write down what they are told."""

    folder: Path

    def __post_init__(self) -> None:
        self.tell("srun", 'printf "%s\\0" "$@" >"$SAID.srun"; env -0 >"$SAID.env"; exit "${SRUN_EXITS:-0}"')
        self.tell("squeue", 'echo "${SQUEUE_SAYS:-RUNNING}"')
        self.tell("scontrol", 'echo "$@" >>"$SAID.scontrol"')

    def tell(self, command: str, body: str) -> None:
        path = self.folder / command
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        """Run a script as task 2 of an array."""
        given = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "SAID": str(self.folder / "said"),
            "SLURM_JOB_ID": "43",
            "SLURM_ARRAY_JOB_ID": "41",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_CPUS_PER_TASK": "3",
        }
        for said in self.folder.glob("said.*"):
            said.unlink()
        text = os.fsencode(script)
        return subprocess.run(["bash"], input=text, env={**given, **environment}, capture_output=True, check=False)

    def said(self, command: str) -> list[str]:
        path = self.folder / f"said.{command}"
        return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]] if path.exists() else []

    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.said("env"))

    @property
    def requeued(self) -> str:
        path = self.folder / "said.scontrol"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def render(spec: Job = PLAIN, site: SlurmSection | None = None) -> str:
    return sbatch.render(sbatch.template(spec.name), spec, site or SlurmSection())


def header(spec: Job = PLAIN, **site: object) -> list[str]:
    text = sbatch.render(sbatch.template(spec.name), spec, SlurmSection(**site))  # type: ignore[arg-type]
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


class TestText:
    @pytest.mark.parametrize("name", RENDERED)
    def test_golden_script(self, name: str) -> None:
        assert RENDERED[name]() == (GOLDEN / name).read_text()

    @pytest.mark.parametrize(("spec", "stages"), [(PLAIN, STAGES), (RANKS, OF_RANKS)], ids=["one process", "ranks"])
    def test_scripts_differ_only_in_what_they_ask_for_and_run(self, spec: Job, stages: tuple[str, ...]) -> None:
        bodies = {render(replace(spec, name=stage)).partition("\nset -eo pipefail\n")[2] for stage in stages}
        assert len({body.replace("restarts=yes\n", "") for body in bodies}) == 1
        assert "srun" in bodies.pop()

    def test_script_of_one_process_takes_no_job_of_several_and_an_unknown_name_gets_that_of_a_stage(self) -> None:
        with pytest.raises(SubmissionRefused):
            render(replace(RANKS, name="embed"))
        assert sbatch.template("test", ranks=4) == sbatch.template("train")
        assert sbatch.template("../../etc/passwd") == sbatch.template("test") == sbatch.template("scan")

    def test_only_the_header_and_the_marked_places_are_changed(self) -> None:
        marks = ("#SBATCH ", "# >>> ", "# <<< ")
        for stage in (*STAGES, *OF_RANKS, "supervise"):
            template, inside = sbatch.template(stage), set[str]()
            for part in template.split("# >>> ")[1:]:
                inside |= set(part.partition("# <<< ")[0].splitlines())
            kept = [line for line in template.splitlines() if not line.startswith(marks) and line not in inside]
            rendered = render(replace(PLAIN, name=stage)).splitlines()
            assert [line for line in rendered if line in set(kept)] == kept, stage


class TestHeader:
    def test_numbers_of_tasks_are_ranges(self) -> None:
        for tasks, offset, most, text in [
            (range(1), 0, None, "0"),
            (range(12), 0, 8, "0-11%8"),
            (range(12), 0, 12, "0-11"),
            ([0, 1, 2, 3, 4, 7, 9, 10, 11], 0, 8, "0-4,7,9-11%8"),
            ([1003, 1004, 1009], 1003, None, "0-1,6"),
        ]:
            assert sbatch.array(tasks, offset, most) == text

    def test_offset_is_used_only_where_numbers_are_too_high_and_may_be_too_far_apart(self) -> None:
        spec = replace(PLAIN, tasks=range(1001, 2001))
        assert [sbatch.array_offset(spec, highest) for highest in (None, 2000, 1999, 999)] == [0, 0, 1001, 1001]
        assert sbatch.offset_of(RENDERED["embed.sbatch"]()) == 1003
        with pytest.raises(SubmissionRefused) as refused:
            sbatch.array_offset(spec, 998)
        assert "cluster.slurm.max_array_size" in refused.value.remedy

    def test_has_what_a_task_asks_for_as_the_site_wants_it_said(self) -> None:
        per_cpu = {"memory": "mem-per-cpu", "gpus": "gpus-per-node"}
        fast = PLAIN.asking(partition="fast", qos="high", constraint="avx512")
        for spec, site, wanted in (
            (RICH, {}, "--mem=49153M --gres=gpu:a100:2"),
            (RICH, per_cpu, "--mem-per-cpu=6145M --gpus-per-node=a100:2"),
            (RANKS, {}, "--nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --gres=gpu:4 --mem=98304M"),
            (RANKS, per_cpu, "--gpus-per-node=4 --mem-per-cpu=3072M"),
            (RANKS.asking(nodes=1, ranks=0), {}, "--nodes=1 --ntasks=1"),
            (fast, {"partition": "slow", "qos": "low"}, "--partition=fast --qos=high --constraint=avx512"),
            # whole minutes, and a warning before the limit but not at once
            (PLAIN.asking(time_s=60), {}, "--time=00:01:00 --signal=USR2@15"),
            (PLAIN.asking(time_s=61), {}, "--time=00:02:00 --signal=USR2@15"),
            (PLAIN.asking(time_s=90_000), {}, "--time=25:00:00 --signal=USR2@90"),
        ):
            assert set(wanted.split()) < set(header(spec, **site)), wanted
        assert not [option for option in header(RICH, memory="none") if option.startswith("--mem")]
        assert not [option for option in header(RANKS.asking(nodes=1, ranks=0)) if "per-node" in option]

    def test_what_a_header_or_a_shell_cannot_say_is_refused(self) -> None:
        for folder, kind in (("a\nb", ConfigError), ("a\\b", SubmissionRefused), ("a\udcff", ConfigError)):
            with pytest.raises(kind) as refused:
                render(replace(PLAIN, log_dir=f"/runs/{folder}"))
            assert "cluster.runs" in refused.value.remedy

    def test_name_in_the_queue_is_the_tag_made_harmless(self) -> None:
        names = [sbatch.job_name(replace(PLAIN, tag=tag)) for tag in ("run-1", "a,b", "a;b", "", "x" * 500)]
        assert names[0] == "run-1"
        assert names[3] == "pipeline-scan"
        assert len(set(names)) == 5
        assert all(sbatch.NAME.fullmatch(name) for name in names)


class TestShell:
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(words=TEXTS | NOISE, value=TEXTS | NOISE)
    def test_any_words_reach_the_task_as_they_are(self, node: Node, words: list[str], value: list[str]) -> None:
        text = os.fsdecode(os.fsencode("".join(value)))  # two halves of a character are one
        done = node.run(render(replace(PLAIN, argv=("program", *words, TASK), env={"GIVEN": text})))
        assert done.returncode == 0, done.stderr
        said = node.said("srun")
        assert said[said.index("program") + 1 :] == [*words, "2"]
        assert node.environment()["GIVEN"] == text
        assert b"\r" not in os.fsencode(render(replace(PLAIN, argv=("program", *words))))

    @pytest.mark.parametrize("runtime", ["apptainer", "pyxis", "podman"])
    def test_each_runtime_is_told_what_it_starts_and_what_that_sees(self, node: Node, runtime: str) -> None:
        container = CONTAINER.model_copy(update={"runtime": runtime})
        spec = replace(CONTAINED, tasks=range(4))
        done = node.run(render(spec, SlurmSection(container=container)), TMPDIR=str(node.folder), SCRATCH="/s")
        assert done.returncode == 0, done.stderr
        said = node.said("srun")
        places = [*spec.sees, str(node.folder)]
        binds = [*(f"{place}:{place}" for place in places), "/s/in:/in:ro", "/data:/data"]
        inner = ["env", "PYTHONPATH=", "PYTHONHOME=", "PYTHONNOUSERSITE=1", "GREETING=it's $HOME", "python3"]
        assert said[-len(inner) - len(spec.argv) + 1 :] == [*inner, *spec.argv[1:-1], "2"]
        outer, here = said[2 : -len(inner) - len(spec.argv) + 1], str(Path.cwd())
        if runtime == "pyxis":
            mounts = f"--container-mounts={','.join(binds)}"
            image = [f"--container-image={container.image}", mounts, f"--container-workdir={here}", "--contain"]
            assert outer == image
        elif runtime == "apptainer":
            bound = [word for bind in binds for word in ("--bind", bind)]
            assert outer == ["apptainer", "exec", *bound, "--pwd", here, "--nv", "--contain", container.image]
        else:
            bound = [word for bind in binds for word in ("--volume", bind)]
            cards = ["--device", "nvidia.com/gpu=all", "--contain", container.image]
            assert outer[:3] == ["podman", "run", "--rm"]
            assert outer[-len(bound) - 6 :] == [*bound, "--workdir", here, *cards]

    def test_no_card_is_lent_to_what_asks_for_none_and_nothing_is_wrapped_that_sees_nothing(self, node: Node) -> None:
        site = SlurmSection(container=CONTAINER)
        node.run(render(replace(CONTAINED, tasks=range(4)).asking(gpus=0), site))
        assert "--nv" not in node.said("srun")
        assert render(PLAIN, site) == render(PLAIN)

    def test_task_is_its_index_and_the_offset(self, node: Node) -> None:
        spec = replace(PLAIN, tasks=range(1000, 1004))
        node.run(sbatch.render(sbatch.template("scan"), spec, SlurmSection(), highest_task=9))
        assert node.said("srun")[-1] == "1002"

    def test_threads_are_as_many_as_cores_were_given_unless_the_job_says_otherwise(self, node: Node) -> None:
        node.run(render())
        names = ("SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        assert [node.environment()[name] for name in names] == ["3"] * 4
        node.run(render(replace(PLAIN, env={"OMP_NUM_THREADS": "1"})))
        assert node.environment()["OMP_NUM_THREADS"] == "1"

    def test_site_setup_may_use_what_is_not_set_and_ends_the_job_where_it_fails(self, node: Node) -> None:
        assert node.run(render(site=SlurmSection(setup=("export MADE=a$NOT_SET",)))).returncode == 0
        assert node.environment()["MADE"] == "a"
        assert node.run(render(site=SlurmSection(setup=("(exit 9)",)))).returncode == 9
        assert node.said("srun") == []

    def test_scratch_is_a_folder_of_the_tasks_own_that_goes_with_it(self, node: Node, tmp_path: Path) -> None:
        (tmp_path / "it's here").mkdir()
        site = SlurmSection(scratch="$SOMEWHERE/it's here")
        assert node.run(render(site=site), SOMEWHERE=str(tmp_path)).returncode == 0
        temporary = Path(node.environment()["TMPDIR"])
        assert temporary.parent == tmp_path / "it's here"
        assert not temporary.exists()

    def test_missing_scratch_is_told_and_runs_nothing(self, node: Node, tmp_path: Path) -> None:
        done = node.run(render(site=SlurmSection(scratch="/no/such")), TMPDIR="/not/here/either")
        assert (done.returncode, node.environment()["TMPDIR"]) == (0, "/tmp")
        assert b"/no/such" in done.stderr
        node.run(render(site=SlurmSection(scratch=f"$(touch {tmp_path}/ran)`touch {tmp_path}/ran`")))
        assert not (tmp_path / "ran").exists()

    def test_exit_code_of_the_step_is_the_jobs_and_an_interrupted_task_goes_back_into_the_queue(
        self, node: Node
    ) -> None:
        for code in (0, 1, 137, 75, 140):
            assert node.run(render(), SRUN_EXITS=str(code)).returncode == code
            assert node.requeued == ("requeue 41_2\n" if code in (75, 140) else ""), code

    def test_task_that_somebody_ends_or_that_came_back_often_does_not_come_back(self, node: Node) -> None:
        for more in ({"SQUEUE_SAYS": "COMPLETING"}, {"SLURM_RESTART_COUNT": "100"}):
            assert node.run(render(), SRUN_EXITS="75", **more).returncode == 75
            assert node.requeued == "", more
        node.tell("scontrol", "exit 1")  # which refuses to take it back
        done = node.run(render(), SRUN_EXITS="75")
        assert (done.returncode, bool(done.stderr)) == (75, True)

    @pytest.mark.parametrize(
        ("code", "given", "scontrol"),
        [
            (0, {}, ""),
            (1, {}, "requeue 43|update JobId=43 ExcNodeList=n1"),
            (137, {"DEPENDS": "afterany:430_*(unfulfilled)"}, "requeue 43|update JobId=43 ExcNodeList=n1"),
            (1, {"DEPENDS": "afterany:43_*(unfulfilled)"}, ""),
            (1, {"NODES": "n1"}, "requeue 43"),
            (1, {"SLURM_RESTART_COUNT": "5"}, ""),
            (75, {"SLURM_RESTART_COUNT": "50"}, "requeue 43"),
            (1, {"SLURM_JOB_NAME": "pipeline-supervise"}, ""),  # submitted by hand
        ],
    )
    def test_a_visit_that_fails_and_for_which_no_other_waits_goes_back_into_the_queue_off_its_node(
        self, node: Node, code: int, given: dict[str, str], scontrol: str
    ) -> None:
        node.tell("squeue", 'case "$*" in *%E*) echo "${DEPENDS:-}";; *) echo ,;; esac')
        node.tell("sinfo", "printf '%s\\n' ${NODES:-n1 n2}")
        node.tell("scontrol", 'if [ "$1" = show ]; then echo "$3"; else echo "$@" >>"$SAID.scontrol"; fi')
        there = {"SLURM_JOB_NAME": "r-supervise-2", "SLURMD_NODENAME": "n1", "SLURM_JOB_PARTITION": "p"}
        done = node.run(render(replace(VISIT, argv=("sh", "-c", f"exit {code}"))), **{**there, **given})
        assert (done.returncode, "|".join(node.requeued.splitlines())) == (code, scontrol), done.stderr
        broken = render(replace(VISIT, argv=("true",)), site=SlurmSection(setup=("module load nowhere",)))
        assert node.run(broken, **there).returncode == 127
        assert node.requeued.startswith("requeue 43\n")

    def test_ranks_are_started_together_and_none_is_ended_for_anothers_exit_code(self, node: Node) -> None:
        assert node.run(render(RANKS), SRUN_EXITS="75").returncode == 75
        said = node.said("srun")
        together = "--ntasks=8 --mpi=none --kill-on-bad-exit=0 --wait=60 --label"
        assert " ".join(said[: said.index("python")]) == together
        assert node.requeued == "requeue 41_2\n"
        node.run(render(RANKS.asking(nodes=1, ranks=0)), ranks="7")
        assert node.said("srun")[:3] == ["--ntasks=1", "--mpi=none", "python"]

    @pytest.mark.parametrize(("name", "code", "starts"), [("train", 137, 3), ("train", 75, 1), ("evaluate", 137, 1)])
    def test_processes_of_a_training_start_again_as_often_as_the_worker_says(
        self, node: Node, name: str, code: int, starts: int
    ) -> None:
        answers = '[ "$(grep -c asked "$SAID.starts")" = 3 ] || echo again'
        body = f'case "$*" in *--ended*) echo asked >>"$SAID.starts"; {answers};; *) echo began >>"$SAID.starts"; exit'
        node.tell("srun", f"{body} {code};; esac")
        assert node.run(render(replace(RANKS, name=name))).returncode == code
        assert (node.folder / "said.starts").read_text().split().count("began") == starts

    @pytest.mark.parametrize("nodes", ["1", "2"])
    def test_scratch_of_one_node_is_not_the_place_of_several(self, node: Node, tmp_path: Path, nodes: str) -> None:
        site = SlurmSection(scratch=str(tmp_path))
        assert node.run(render(RANKS, site), SLURM_JOB_NUM_NODES=nodes, TMPDIR=str(tmp_path)).returncode == 0
        temporary = node.environment()["TMPDIR"]
        assert (temporary == "/tmp") == (nodes == "2")
        assert temporary.startswith(f"{tmp_path}/pipeline-") == (nodes == "1")


@pytest.mark.parametrize("stage", OF_RANKS)
def test_a_script_by_hand_asks_for_what_its_allocation_has(node: Node, stage: str) -> None:
    def given(**environment: str) -> dict[str, str]:
        """Run the script as it is; return the settings of the command that it starts."""
        assert node.run(sbatch.template(stage), **environment).returncode == 0
        said = node.said("srun")
        assert said[:5] == ["--ntasks=1", "--mpi=none", "pipeline", "submit", stage]
        assert said[5:8] == ["--executor", "local", "--follow"]
        return dict(word.split("=") for word in said[9::2])

    settings = given(SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="8")
    config = read_config(None, ["data.path=x", *(f"{key}={value}" for key, value in settings.items())]).config
    asked = getattr(config.cluster, stage)
    assert (asked.nodes, asked.gpus, asked.ranks, asked.cpus, asked.time) == (1, 2, "auto", 4, 30 * 86_400)
    assert config.cluster.embed.gpus == 2
    settings = given()  # without GPUs, ranks are those of the configuration
    assert settings[f"cluster.{stage}.gpus"] == "0"
    assert f"cluster.{stage}.ranks" not in settings
    done = node.run(sbatch.template(stage), SLURM_JOB_NUM_NODES="2")
    assert (done.returncode, node.said("srun")) == (2, [])
    assert f"submit {stage} --executor slurm" in done.stderr.decode()


if __name__ == "__main__":
    for file, text in RENDERED.items():
        (GOLDEN / file).write_text(text())
