"""What `--help` says is an interface: it is frozen, fast, and never waits for torch.

`python -m tests.cli.test_help` writes the frozen texts anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[2]
PIPELINE = Path(sys.executable).with_name("pipeline")
COMMANDS = (
    "",
    "demo",
    "init",
    "doctor",
    "submit",
    "tune",
    "dock",
    "embed",
    "export",
    "export embeddings",
    "plan",
    "explain",
    "status",
    "items",
    "compare",
    "logs",
    "report",
    "replay",
    "completion",
    "cache",
    "cache stat",
    "cache validate",
    "cache repair",
    "cache regenerate",
    "cache clean",
    "cache compact",
    "cache export",
    "cache import",
    "weights",
    "weights fetch",
    "weights import",
    "weights check",
    "weights synth",
    "config",
    "config show",
    "config check",
    "config schema",
)
# What stands beside a training step while it runs, or is traced.
BESIDE_A_STEP = (
    "device/accelerator.py",
    "device/batch_transfer.py",
    "memory/leaks/inspection.py",
    "memory/leaks/leak_detector.py",
    "device/out_of_memory.py",
    "memory/runtime/pinned_tensors.py",
    "memory/runtime/recovery.py",
    "stages/train.py",
)


def help_of(command: str) -> str:
    """Return the help of a command as a terminal of 100 columns shows it."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    words = [str(PIPELINE), *command.split(), "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout


def golden(command: str) -> Path:
    """Return where the frozen help of a command is."""
    return GOLDEN / f"{'-'.join(['pipeline', *command.split()])}.txt"


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_as_frozen(command: str) -> None:
    assert help_of(command) == golden(command).read_text(), "if meant: python -m tests.cli.test_help"


def test_every_command_is_frozen() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden(command).name for command in COMMANDS}


def test_nothing_reachable_from_the_command_line_imports_torch_before_there_is_something_to_encode() -> None:
    """The import rule keeps torch in two rooms, the tracer and a view; this loads all the rest and what it needs."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "pipeline").rglob("*.py"))
        if path.name not in ("__init__.py", "pyg_view.py")
        and not str(path).endswith(BESIDE_A_STEP)
        and not {"encoder", "training", "tasks", "tracing"} & set(path.parts)
    ]
    code = f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_supervisor_and_a_task_that_make_no_graph_start_without_scipy() -> None:
    code = "import sys, pipeline.runs.supervisor, pipeline.runs.worker\n"
    code += "assert not {'torch', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_needs_neither_numpy_nor_pydantic() -> None:
    code = (
        "import sys; sys.argv = ['pipeline', '--help']\n"
        "from pipeline.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'pydantic', 'gemmi', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


if __name__ == "__main__":
    for each in COMMANDS:
        golden(each).write_text(help_of(each))
