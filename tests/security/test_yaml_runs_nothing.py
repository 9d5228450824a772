"""No YAML builds an object, unfolds without end or is read without a limit: files, sites, recipes, `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config.yaml_document import MAX_BYTES
from tests.testkit.command import Command, Typed
from tests.testkit.counted import calls_of

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


def test_a_tag_is_refused_by_its_name_and_builds_nothing(pipeline: Command, here: Path) -> None:
    plain = "data: {path: data.csv}\n"
    for name, tag in TAGS.items():
        for place, text, words in (
            ("value", f"data: {{path: {tag} }}\n", ()),
            ("list", f"{plain}cache:\n  under:\n    - {tag}\n", ()),
            ("key", f"{plain}? {tag}\n: x\n", ()),
            ("section", f"{plain}cache: {tag}\n", ()),
            ("site", f"{plain}cluster: {{site: ./site.yaml}}\n", ()),
            ("--set", plain, ("--set", f"data.path={tag}")),
            ("--set site", plain, ("--set", f"cluster.site={tag}")),
        ):
            (here / "pipeline.yaml").write_text(text)
            (here / "site.yaml").write_text(f"slurm:\n  name: {tag}\n")
            told = pipeline(*CHECK, *words)
            assert (told.code, "error: " in told.err) == (2, True), (name, place)
            assert place not in ("value", "--set", "site") or "is not allowed" in told.err, (name, place)
            assert not (here / "made").exists(), (name, place)


@pytest.mark.parametrize("place", ["file", "--set", "site"])
def test_aliases_that_unfold_to_a_thousand_million_values_are_refused_at_once(
    pipeline: Command, here: Path, place: str
) -> None:
    one_line = "{" + ", ".join(line for line in BOMB.splitlines()) + "}"
    (here / "pipeline.yaml").write_text("data: {path: data.csv}\n" + (BOMB if place == "file" else ""))
    (here / "site.yaml").write_text(BOMB)
    words = {"file": (), "--set": ("--set", f"data={one_line}"), "site": ("--set", "cluster.site=./site.yaml")}[place]
    told: list[Typed] = []
    assert calls_of(lambda: told.append(pipeline(*CHECK, *words))) < 1_000_000
    assert (told[0].code, "after aliases are expanded" in told[0].err) == (2, True), told[0].err


def test_a_file_without_end_is_refused_before_it_is_built(pipeline: Command, here: Path) -> None:
    for text, said in [
        ("data: " + "[" * 100_000, "nested too deeply"),
        ("data: &a [*a]\n", "after aliases are expanded"),
        ("data: {path: data.csv}\n# " + "x" * MAX_BYTES, "not a configuration"),
        ("data: {path: data.csv}\n<<: {embed: {}}\n", "unknown key"),
    ]:
        (here / "pipeline.yaml").write_text(text)
        told = pipeline(*CHECK)
        assert (told.code, said in told.err) == (2, True), told.err[:500]


def test_a_recipe_and_a_preset_are_ours_by_name_and_no_path(pipeline: Command, here: Path) -> None:
    for recipe in ["../../etc/passwd", "/etc/passwd", "$(touch made)", "a/b", ".."]:
        told = pipeline("init", "new", "--recipe", recipe)
        assert told.code == 2, recipe
        assert not (here / "made").exists(), recipe
        assert not (here / "new").exists(), recipe
    for preset in ["../sites/generic", "/etc/passwd", "!!python/name:os.system"]:
        (here / "pipeline.yaml").write_text("data: {path: data.csv}\n")
        assert pipeline(*CHECK, "--set", f"train.preset={preset}").code == 2, preset
