"""Measure whole commands by turns, and keep what was found as rows of one page.

    python benchmarks/measure.py      # write the tables of README.md again, from results.json

Every script takes --rounds (turns of each side) and --save (put its rows into results.json and README.md). Without
--save it only prints them. A script ends with 0 only if it ran the real thing and both sides agreed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results.json", ROOT / "benchmarks/README.md"
STRUCTURES = Path(os.environ.get("PIPELINE_STRUCTURES", ROOT / "tests/reference/structures"))
PIPELINE = Path(sys.executable).with_name("pipeline")
# As users have it: one thread a process, and modules that are compiled once.
SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
LIMIT_S = 4 * 3600
FIGURES = "figures"  # the table of what is compared
CASE = "--case"  # that starts a case of a script
TAIL = 3000  # characters of a failed command's output


@dataclass(frozen=True)
class Cost:
    """What a command took, together with every process that it started and waited for."""

    wall_s: float
    cpu_s: float
    peak_bytes: int  # of its largest process
    out: str

    def json(self) -> Any:
        """Return the document in its last line of output."""
        return json.loads(self.out.splitlines()[-1])


def run(
    command: Sequence[str | Path], folder: Path = ROOT, *, env: Mapping[str, str] | None = None, code: int = 0
) -> Cost:
    """Run a command to its end; stop everything unless it ends with the expected code."""
    known = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT), **(env or {})}
    begun = time.perf_counter()
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=folder, env=known, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - begun
    if process.returncode != code:
        fail(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{out[-TAIL:]}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, out)


def itself(script: str, *words: str | Path) -> list[str]:
    """Return the command that runs a part of a script in a process of its own."""
    return [sys.executable, "-W", "ignore", script, *map(str, words)]


def pipeline(*words: str | Path) -> list[str]:
    """Return a command of this project."""
    return [str(PIPELINE), *map(str, words)]


def by_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, *, warm: bool = True) -> dict[str, list[Any]]:
    """Run all ways A B A B, each round in the other order; the first round only warms caches."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    if warm:
        for way in ways.values():
            way()
    for number in range(rounds):
        for name in sorted(ways, key=list(ways).index, reverse=bool(number % 2)):
            found[name].append(ways[name]())
            say(f"  round {number + 1} {name}: {short(found[name][-1])}")
    return found


def short(value: Any) -> str:
    """Return a measurement for the log."""
    return f"{value.cpu_s:.2f} CPU-s, {value.wall_s:.2f} s" if isinstance(value, Cost) else f"{value}"[:120]


def isolated(
    script: str, case: str, given: Mapping[str, Any], limit_s: float, log: Path, env: Mapping[str, str]
) -> dict[str, Any]:
    """Run a case of a script in a process of its own; return what it found, or an error. A crash costs only itself."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script, CASE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, text=True, cwd=ROOT, env=dict(env),
            start_new_session=True,
        )  # fmt: skip
        out, is_late = "", False
        try:
            out, _ = process.communicate(json.dumps({"case": case, "given": dict(given)}) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
            process.communicate()
    with suppress(IndexError, ValueError):
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        if "error" not in found:
            log.unlink()
        return found
    printed = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    why = f"took more than {limit_s:.0f} s" if is_late else f"process ended with {process.returncode}"
    return {"error": f"{why}: {printed[-1][:300]}" if printed else why}


def answer(cases: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]) -> NoReturn:
    """Run the case that `isolated` asks for; print what it found as one line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    asked = json.loads(sys.stdin.readline())
    try:
        found = cases[asked["case"]](asked["given"])
    except Exception as error:  # noqa: BLE001 - a failing case is a result
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    print(json.dumps(found), file=out, flush=True)
    sys.stderr.flush()
    os._exit(0)  # a GPU is free sooner


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of numbers."""
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    @classmethod
    def ratio(cls, over: Sequence[float], under: Sequence[float]) -> Spread:
        """Return the spread of ratios, round by round."""
        return cls.of([top / bottom for top, bottom in zip(over, under, strict=True)])

    def __format__(self, form: str) -> str:
        """Write 1.23× (1.20 to 1.30), with the unit after the format: `.2f×`; of one round 1.23×."""
        number, unit = re.fullmatch(r"([,.\d]*[a-z%]?)(.*)", form).groups()  # type: ignore[union-attr]
        spread = f" ({self.low:{number}} to {self.high:{number}})" if self.low < self.high else ""
        return f"{self.median:{number}}{unit}{spread}"


def cpu(costs: Sequence[Cost]) -> list[float]:
    """Return CPU seconds."""
    return [cost.cpu_s for cost in costs]


def wall(costs: Sequence[Cost]) -> list[float]:
    """Return wall seconds."""
    return [cost.wall_s for cost in costs]


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    id: str
    what: str
    against: str
    reach: str
    measured: str
    command: str
    missed: str = ""  # why, or what stands in the way; empty: reached
    table: str = FIGURES
    date: str = ""
    machine: str = ""


def options(doc: str, rounds: int, **more: Mapping[str, Any]) -> argparse.Namespace:
    """Return what was typed: the options of every script, and more of its own (`name={"type": int, ...}`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each side (default: {rounds})")
    parser.add_argument("--save", nargs="*", metavar="ROW", help="put rows (default: all) into results.json, README.md")
    for name, given in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def publish(rows: Sequence[Row], *, save: Sequence[str] | None) -> int:
    """Print rows as a table and as JSON; keep those that were asked for, none if `save` is None."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    dated = [Row(**{**asdict(row), "date": today, "machine": machine()}) for row in rows]
    print(table(dated))
    for row in dated:
        print(json.dumps(asdict(row), ensure_ascii=False))
    if save is not None:
        new = {row.id: row for row in dated if not save or row.id in save}
        merged = [new.pop(row.id, row) for row in kept()]
        RESULTS.write_text(json.dumps([asdict(row) for row in (*merged, *new.values())], indent=1, ensure_ascii=False))
        write_page()
    return 0


def kept() -> list[Row]:
    """Return the rows that were saved."""
    return [Row(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def write_page() -> None:
    """Write the rows between the marks of README.md."""
    text, rows = PAGE.read_text(), kept()
    for name in dict.fromkeys(row.table for row in rows):
        block = table([row for row in rows if row.table == name])
        pattern = rf"(<!-- rows: {re.escape(name)} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text, flags=re.DOTALL)
    PAGE.write_text(text)


def table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown."""
    columns = ("what", "against", "reach", "measured", "command", "date")
    if all(row.table != FIGURES for row in rows):
        columns = ("what", "measured", "date")
    lines = (" | ".join(cell(row, column) for column in columns) for row in rows)
    return "\n".join(f"| {text} |" for text in (" | ".join(columns), " | ".join(["---"] * len(columns)), *lines))


def cell(row: Row, column: str) -> str:
    """Return a cell as Markdown; a missed figure is bold, with the reason."""
    text: str = getattr(row, column)
    if column == "measured" and row.missed:
        return f"**{text}** {row.missed}"
    return f"`{text}`" if column == "command" else text


def machine() -> str:
    """Return cores and model of the processor, system and Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def structures() -> list[Path]:
    """Return the real PDB complexes; stop where there are none."""
    files = sorted((STRUCTURES / "complexes").glob("*.pdb"))
    return files or fail(f"no PDB files in {STRUCTURES / 'complexes'} (PIPELINE_STRUCTURES names another folder)")


def chill(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)


def fail(why: str) -> NoReturn:
    """End without a figure."""
    sys.exit(f"nothing was measured: {why}")


if __name__ == "__main__":
    write_page()
