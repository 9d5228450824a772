"""What the other proofs rest on: the store changes files only by a disk, whose steps they record and make fail."""

from __future__ import annotations

import ast

from tests.conftest import ROOT

CHANGING = {
    "chmod", "copyfile", "copytree", "ftruncate", "fsync", "hardlink_to", "link", "makedirs", "mkdir", "mkfifo",
    "mkstemp", "move", "NamedTemporaryFile", "open", "open_new", "pwrite", "rename", "rmdir", "rmtree", "symlink_to",
    "TemporaryFile", "touch", "truncate", "unlink", "write_bytes", "write_text",
}  # fmt: skip
ALLOWED = [
    ("damage_report.py", "self.path.open"),  # to read
    *[("sealed_folder.py", "shutil.rmtree")] * 2,  # of what was never published
]


def test_the_store_and_sealed_folders_change_files_only_through_a_disk() -> None:
    store = [path for path in (ROOT / "pipeline/store").rglob("*.py") if path.name != "disk.py"]
    calls = [
        (path.name, ast.unparse(node.func))
        for path in sorted([*store, ROOT / "pipeline/training/checkpoints/sealed_folder.py"])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert len(calls) > 1000
    changing = [(file, name) for file, name in calls if name.rpartition(".")[2] in CHANGING]
    assert [
        (file, name) for file, name in changing if not name.rpartition(".")[0].endswith(("disk", "draft"))
    ] == ALLOWED
    assert len(changing) > 10, "the steps that a disk takes are seen"
