"""No YAML builds an object, unfolds without end or is read without a limit: files, sites, recipes, `--set`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from pipeline.config.yaml_document import MAX_BYTES
from tests.testkit.command import Command

TAGS = {
    "apply": "!!python/object/apply:os.system ['touch made']",
    "new": "!!python/object/new:os.system ['touch made']",
    "name": "!!python/name:os.system",
    "module": "!!python/module:os",
    "tuple": "!!python/tuple [a, b]",
    "own": "!touch made",
    "binary": "!!binary dG91Y2g=",
}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CHECK = ("config", "check")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("id,path\na,a.pdb\n")
    return tmp_path


def test_the_tag_would_run_a_command_were_it_read_without_care(here: Path) -> None:
    yaml.load(TAGS["apply"], Loader=yaml.UnsafeLoader)
    assert (here / "made").exists()


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("place", ["value", "list", "key", "section", "--set", "site", "--set site"])
def test_a_tag_is_refused_by_its_name_and_builds_nothing(pipeline: Command, here: Path, name: str, place: str) -> None:
    tag, words = TAGS[name], list[str]()
    texts = {
        "value": f"data: {{path: {tag} }}\n",
        "list": f"data: {{path: data.csv}}\ncache:\n  under:\n    - {tag}\n",
        "key": f"data: {{path: data.csv}}\n? {tag}\n: x\n",
        "section": f"data: {{path: data.csv}}\ncache: {tag}\n",
        "site": "data: {path: data.csv}\ncluster: {site: ./site.yaml}\n",
    }
    (here / "pipeline.yaml").write_text(texts.get(place, "data: {path: data.csv}\n"))
    (here / "site.yaml").write_text(f"slurm:\n  name: {tag}\n")
    if place.startswith("--set"):
        key = "cluster.site" if place.endswith("site") else "data.path"
        words = ["--set", f"{key}={tag}"]
    told = pipeline(*CHECK, *words)
    assert told.code == 2
    assert "error: " in told.err
    if place in ("value", "--set", "site"):
        assert "is not allowed: plain values only" in told.err
    assert not (here / "made").exists()


@pytest.mark.parametrize("place", ["file", "--set", "site"])
def test_aliases_that_unfold_to_a_thousand_million_values_are_refused_at_once(
    pipeline: Command, here: Path, place: str
) -> None:
    one_line = "{" + ", ".join(line for line in BOMB.splitlines()) + "}"
    (here / "pipeline.yaml").write_text("data: {path: data.csv}\n" + (BOMB if place == "file" else ""))
    (here / "site.yaml").write_text(BOMB)
    words = {"file": (), "--set": ("--set", f"data={one_line}"), "site": ("--set", "cluster.site=./site.yaml")}[place]
    start = time.process_time()
    told = pipeline(*CHECK, *words)
    assert (told.code, "once aliases are followed" in told.err) == (2, True), told.err
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: " + "[" * 100_000, "nested too deeply"),
        ("data: &a [*a]\n", "once aliases are followed"),
        ("data: {path: data.csv}\n# " + "x" * MAX_BYTES, "this is no configuration"),
        ("data: {path: data.csv}\n<<: {embed: {}}\n", "unknown key"),
    ],
    ids=["deep", "of itself", "large", "merged"],
)
def test_a_file_without_end_is_refused_before_it_is_built(pipeline: Command, here: Path, text: str, said: str) -> None:
    (here / "pipeline.yaml").write_text(text)
    told = pipeline(*CHECK)
    assert (told.code, said in told.err) == (2, True), told.err[:500]


@pytest.mark.parametrize("recipe", ["../../etc/passwd", "/etc/passwd", "$(touch made)", "a/b", ".."])
def test_a_recipe_is_one_of_ours_by_name_and_no_path(pipeline: Command, here: Path, recipe: str) -> None:
    told = pipeline("init", "new", "--recipe", recipe)
    assert told.code == 2
    assert not (here / "made").exists()
    assert not (here / "new").exists()


@pytest.mark.parametrize("preset", ["../sites/generic", "/etc/passwd", "!!python/name:os.system"])
def test_a_preset_is_one_of_ours_by_name_and_no_path(pipeline: Command, here: Path, preset: str) -> None:
    (here / "pipeline.yaml").write_text("data: {path: data.csv}\n")
    assert pipeline(*CHECK, "--set", f"train.preset={preset}").code == 2
