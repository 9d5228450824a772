"""Programs that stand in for others: they write down what they are told, and do nothing."""

from __future__ import annotations

from pathlib import Path

SILENT = ("sinfo", "sacct", "sacctmgr", "squeue", "scancel", "scontrol")
TESTED = "echo 'sbatch: Job 7 to start at 2026-01-01T00:00:00 using 1 processors on nodes n1' >&2"


def program(folder: Path, name: str, body: str) -> Path:
    """Write a program of bash."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def silent_slurm(folder: Path) -> Path:
    """Write Slurm's commands: sbatch says that a job could start, srun keeps its words, the others say nothing."""
    for name in SILENT:
        program(folder, name, "exit 0")
    program(folder, "sbatch", f"cat >/dev/null; {TESTED}")
    program(folder, "srun", 'printf "%s\\0" "$@" >>"${SAID:-/dev/null}"')
    return folder
