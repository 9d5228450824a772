"""Are the tests of the pure cores strict? Each small change of their code, a mutant, must fail one of their tests.

mutants.yaml names the cores, their tests, and the mutants that change nothing, with the reason. A core's tests are
collected and run once. Then, for each mutant, a fork of that process has the changed code put in the place of its
function and runs the tests that enter it, the quickest first, until one fails. Where one fails of a mutant that is said
to change nothing, the reason is refuted. No file is changed. Limits are in seconds of the processor, so that a busy
machine kills no mutant.

It goes on where it stopped: what was killed stays killed while its function is as it was, what survived also while the
tests are. `--anew` forgets that.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.mutant_kinds import Mutant, mutants_of  # noqa: E402

CORES = yaml.safe_load((ROOT / "benchmarks/mutants.yaml").read_text())
ROOM_BYTES = 2 << 30  # more than that no test needs; a mutant may
EXAMPLES = 30  # of a property, not made smaller: that one fails is enough


class Core:
    """A core as mutants.yaml has it, its mutants, and what became of them."""

    def __init__(self, name: str, state: Path) -> None:
        told = CORES[name]
        self.name, self.state = name, state
        self.tests, self.skipped = told["tests"], told.get("skipped", ())
        self.equivalent: dict[str, str] = told.get("equivalent", {})
        self.trees = {file: ast.parse((ROOT / file).read_text()) for file in told["of"]}
        self.mutants = [
            mutant for file, how in told["of"].items() for mutant in mutants_of(file, self.trees[file], **(how or {}))
        ]
        self.mutants.sort(key=lambda mutant: sha256(mutant.name.encode()).digest())  # the first ones are a fair sample
        if unknown := set(self.equivalent) - {mutant.name for mutant in self.mutants}:
            raise SystemExit(f"{name}: mutants.yaml has equivalents that are no mutants: {sorted(unknown)}")
        tests = [ROOT / test.partition("::")[0] for test in self.tests]
        self.digest = sha256(b"".join(test.read_bytes() for test in tests)).hexdigest()[:16]

    def known(self) -> dict[str, str]:
        """Return what became of mutants, by their keys."""
        lines = self.state.read_text().splitlines() if self.state.exists() else []
        told = [json.loads(line) for line in lines]
        return {one["key"]: one["end"] for one in told if one["end"] != "survived" or one["tests"] == self.digest}

    def left(self, most: int | None) -> list[Mutant]:
        """Return those of the first so many that are still to be tried."""
        known = self.known()
        return [mutant for mutant in self.mutants[:most] if mutant.key not in known]

    def note(self, mutant: Mutant, end: str) -> None:
        with self.state.open("a") as file:
            file.write(json.dumps({"key": mutant.key, "end": end, "tests": self.digest}) + "\n")

    def told(self) -> dict[str, Any]:
        """Return what became of all of them."""
        known = self.known()
        tried = {mutant.name: known[mutant.key] for mutant in self.mutants if mutant.key in known}
        ends = {name: end for name, end in tried.items() if name not in self.equivalent}
        lines = {mutant.name: f"{mutant.file}:{mutant.line}" for mutant in self.mutants}
        return {
            "possible": len(self.mutants),
            "made": len(ends),
            "killed": sum(end == "killed" for end in ends.values()),
            "killed_by_time": sum(end == "time" for end in ends.values()),
            "equivalent": [{"what": name, "why": why} for name, why in self.equivalent.items()],
            "refuted": [name for name in self.equivalent if tried.get(name, "survived") != "survived"],
            "survivors": sorted(f"{lines[name]} {name}" for name, end in ends.items() if end == "survived"),
        }


class Trial:
    """A plugin of pytest: runs the tests of a core as they are, then for each of its mutants."""

    def __init__(self, core: Core, most: int | None) -> None:
        self.core, self.most = core, most
        self.entered: dict[str, set[tuple[str, int]]] = {}  # test → functions that it enters: file, first line
        self.took_s: dict[str, float] = {}  # of the processor
        self.is_child = False

    def pytest_configure(self) -> None:
        """Draw the same examples for each mutant; imported here, because pytest rewrites it before."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Draw few examples, also where a test says how many; there is no public way to say that."""
        from hypothesis import settings

        for item in items:
            test = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
            if told := getattr(test, "_hypothesis_internal_use_settings", None):
                few = min(told.max_examples, EXAMPLES)
                test._hypothesis_internal_use_settings = settings(told, max_examples=few)  # noqa: SLF001

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.is_child:
            os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._watch(item)
        if session.testsfailed:
            raise session.Failed("the tests fail without any mutant")
        session.items.sort(key=lambda item: self.took_s[item.nodeid])
        for mutant in self.core.left(self.most):
            self.core.note(mutant, end := self._try(mutant, session.items))
            if end == "survived" and mutant.name not in self.core.equivalent:
                print(f"\nsurvived: {mutant.file}:{mutant.line} {mutant.name}", flush=True)
        return True

    def _watch(self, item: pytest.Item) -> None:
        """Run a test, and see which functions of the core it enters."""
        entered = self.entered[item.nodeid] = set()
        files = {str(ROOT / file): file for file in self.core.trees}

        def trace(frame: FrameType, _event: str, _: object) -> None:
            if frame.f_code.co_filename in files:
                entered.add((files[frame.f_code.co_filename], frame.f_code.co_firstlineno))

        begun_s = sum(os.times()[:2])
        sys.settrace(trace)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        sys.settrace(None)
        self.took_s[item.nodeid] = sum(os.times()[:2]) - begun_s

    def _try(self, mutant: Mutant, items: list[pytest.Item]) -> str:
        """Return how the tests end that enter what a mutant changes; of a constant or a class, all of them."""
        place = (mutant.file, mutant.first_line)
        is_entered = any(place in functions for functions in self.entered.values())
        chosen = [item for item in items if place in self.entered[item.nodeid] or not is_entered]
        if (child := os.fork()) == 0:
            self.is_child = True
            limit_s = 5 + int(5 * sum(self.took_s[item.nodeid] for item in chosen))
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM_BYTES,) * 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                mutant.install(self.core.trees[mutant.file])
                for item in chosen:
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            finally:
                os._exit(int(sys.exc_info()[0] is not None))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return "time"
        return "killed" if status else "survived"


def try_core(core: Core, most: int | None) -> int:
    """Try the mutants of a core, in this process and its forks."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", f"--rootdir={ROOT}"]
        skipped = [f"--deselect={test}" for test in core.skipped]
        return int(pytest.main([*words, *skipped, *core.tests], plugins=[Trial(core, most)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the result is written as JSON")
    parser.add_argument("--core", nargs="+", default=list(CORES), choices=list(CORES))
    parser.add_argument("--most", type=int, help="of a core, drawn at random and always the same")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / f"mutants-{os.getuid()}.jsonl")
    parser.add_argument("--anew", action="store_true", help="forget what was tried before")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one core, in this process
    asked = parser.parse_args()
    if asked.here:
        raise SystemExit(try_core(Core(asked.core[0], asked.state), asked.most))
    if asked.anew:
        asked.state.unlink(missing_ok=True)
    most = ["--most", str(asked.most)] if asked.most else []
    for name in asked.core:
        if Core(name, asked.state).left(asked.most):
            words = [sys.executable, __file__, "--here", "--core", name, "--state", str(asked.state), *most]
            subprocess.run(words, cwd=ROOT, check=True)
    kept = json.loads(asked.out.read_text())["cores"] if asked.out and asked.out.exists() else {}
    result = {name: Core(name, asked.state).told() for name in CORES if name in asked.core or name not in kept}
    for name, told in result.items():
        print(f"{name}: {told['made']} made, {told['killed'] + told['killed_by_time']} killed")
        print(*told["survivors"], *(f"not equivalent: {change}" for change in told["refuted"]), sep="\n")
    write(asked.out, summed({name: result.get(name) or kept[name] for name in CORES}))


def summed(cores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all cores and their sums."""
    total = {name: sum(core[name] for core in cores.values()) for name in ("possible", "made")}
    total["killed"] = sum(core["killed"] + core["killed_by_time"] for core in cores.values())
    for name in ("survivors", "equivalent", "refuted"):  # an older result of a core knows of none refuted
        total[name] = sum(len(core.get(name, ())) for core in cores.values())
    total["tried_share"] = (total["made"] + total["equivalent"]) / total["possible"]
    return {"cores": cores, "total": {**total, "killed_share": total["killed"] / max(total["made"], 1)}}


if __name__ == "__main__":
    main()
