"""A task that was loaded once is known without importing it, until anything that it follows from changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import read_config
from pipeline.errors import ConfigError
from pipeline.project.user_code import TaskCode, task_code
from tests.testkit.project import DATA, to_do, write_config
from tests.testkit.trained import TASK, TRAINED, write_project

HELPER = "WIDTH = 4\n"
OWN = """\
from known_helper import WIDTH


class Own:
    def __init__(self, *, width=WIDTH):
        self.width = width

    def model(self): ...
    def cost(self, sizes): ...
    def collate(self, items, rng): ...
    def loss(self, model, batch): ...
    def metrics(self, model, batch):
        return {}
"""
MODULES = ("known_task", "known_helper")
PROBE = """\
import sys
from pipeline.cli.main import main
sys.argv = ["pipeline", "submit", "--stage", "all", "--follow"]
try:
    main()
finally:
    print("imported:", sorted({"torch", "scipy", "trained_task"} & set(sys.modules)))
"""
Ask = Callable[..., TaskCode]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return what asks for the task, as a process does that has not imported it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that changes twice in a second is read again
    (tmp_path / "runs").mkdir()
    (tmp_path / "known_task.py").write_text(OWN)
    (tmp_path / "known_helper.py").write_text(HELPER)

    def asked(options: str = "{}", beside: Path = tmp_path) -> TaskCode:
        monkeypatch.setattr("pipeline.project.user_code._SEEN", {})
        for module in MODULES:
            monkeypatch.delitem(sys.modules, module, raising=False)
        write_config(tmp_path, **DATA, train__task="known_task:Own", train__options=yaml.safe_load(options))
        return task_code(read_config(tmp_path / "pipeline.yaml").config, beside)

    asked()
    return asked


def is_loaded() -> bool:
    return "known_task" in sys.modules


def test_a_task_that_is_known_is_not_imported_and_said_to_be_the_same(ask, tmp_path):
    known = ask()
    assert not is_loaded()
    assert [name for name, _ in known.files] == ["known_helper.py", "known_task.py"]
    for path in (tmp_path / "runs" / ".plans").iterdir():
        path.unlink()
    assert ask() == known
    assert is_loaded()


@pytest.mark.parametrize(
    ("name", "before", "after", "alike"),
    [
        ("known_helper.py", "4", "5", ()),
        ("known_task.py", "self.width = width", "self.width = width + 1", ()),
        ("known_task.py", "return {}", "return {'a': 1}", ("weights_digest",)),
        ("known_task.py", "    def model", "    # a comment\n    def model", ("weights_digest", "outputs_digest")),
    ],
)
def test_whatever_changes_in_its_files_has_it_loaded(ask, tmp_path, name, before, after, alike):
    known = ask()
    (tmp_path / name).write_text((tmp_path / name).read_text().replace(before, after))
    changed = ask()
    assert is_loaded()
    same = tuple(
        part for part in ("weights_digest", "outputs_digest") if getattr(changed, part) == getattr(known, part)
    )
    assert same == alike


def test_an_option_that_it_does_not_take_is_refused_as_before(ask):
    ask("{width: 3}")
    with pytest.raises(ConfigError):
        ask("{widht: 3}")


def test_another_module_that_is_found_first_is_the_task(ask, tmp_path):
    known = ask()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "known_task.py").write_text(OWN.replace("width = width", "width = 7"))
    assert ask(beside=tmp_path / "other").weights_digest != known.weights_digest


LISTS = """
    def files_read(self):
        from pathlib import Path
        return sorted(Path(self.width).glob("*.txt"))
"""


def test_files_that_come_into_a_folder_that_it_lists_are_read_and_those_that_go_are_not(ask, tmp_path):
    (tmp_path / "known_task.py").write_text(OWN + LISTS)
    (tmp_path / "lists").mkdir()
    options = f"{{width: {tmp_path / 'lists'}}}"
    for names in ([], ["a.txt"], ["a.txt", "b.txt"], ["b.txt"]):
        for path in (tmp_path / "lists").iterdir():
            path.unlink()
        for name in names:
            (tmp_path / "lists" / name).write_text(name)
        assert [path.name for path in ask(options).reads] == names
        assert is_loaded()
        assert [path.name for path in ask(options).reads] == names
        assert not is_loaded()


@pytest.mark.parametrize("torn", ["", "{}", "[]", '{"weights_digest": "a"}'])
def test_what_is_torn_is_found_out_again(ask, tmp_path, torn):
    known = ask()
    for path in (tmp_path / "runs" / ".plans").iterdir():
        path.write_text(torn)
    assert ask() == known


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_with_nothing_to_do_imports_neither_torch_nor_scipy_nor_the_task(tmp_path, monkeypatch, pipeline):
    write_project(tmp_path, TRAINED, {"trained_task.py": TASK}, ("train", "train", "val", "test"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trained_task", raising=False)

    def submitted() -> str:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "torch" in submitted().partition("imported:")[2]
    again = submitted()
    assert again.partition("imported: ")[2].startswith("[]")
    assert [missing for _, missing in to_do().values()] == [0] * 5
    assert pipeline("status").code == 0
