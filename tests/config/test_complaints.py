"""Every mistake is named with its line, its value and what was meant, and all of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.errors import ConfigError
from tests.testkit.counted import calls_of

EVERYTHING_WRONG = """\
data:
  source: manifst
  path: $NOWHERE/x.csv
  limt: 5
  limit: "8"
  limit: 3
  receptor_chains: [no, 1]
  max_residues: 4
  max_rejected_fraction: 1.5
structures:
  assembly: 1
  modified:
cache:
  shard_bytes: 12 parsecs
cluster:
  scan:
    time: 60
    mem: 4000
training: {lr: 1e-3}
"""

ALL_COMPLAINTS = """\
16 problems in the configuration
  pipeline.yaml:2: data.source: wants one of manifest, pairs, sabdab, pinder, glob, fasta, reader, got "manifst"; \
did you mean "manifest"?
  pipeline.yaml:3: data.path: the environment variable NOWHERE is not set
  pipeline.yaml:4: data.limt: unknown key; did you mean "limit"?
  pipeline.yaml:5: data.limit: wants a whole number, got "8": leave the quotes out
  pipeline.yaml:6: data.limit: written twice; first at pipeline.yaml:5
  pipeline.yaml:7: data.receptor_chains: wants text, got 1: unquoted, YAML reads a number; put it in quotes
  pipeline.yaml:8: data.max_residues: unknown key; did you mean "structures.max_residues"?
  pipeline.yaml:9: data.max_rejected_fraction: wants at most 1, got 1.5
  pipeline.yaml:11: structures.assembly: wants text, got 1: unquoted, YAML reads a number; put it in quotes
  pipeline.yaml:12: structures.modified: wants one of parent, unknown, reject, got null
  pipeline.yaml:14: cache.shard_bytes: wants a size such as 512MiB, 24G or a number of bytes, got "12 parsecs"
  pipeline.yaml:17: cluster.scan.time: wants a time such as 01:30:00, 2-12:00:00, 90m or 2h, got 60
  pipeline.yaml:18: cluster.scan.mem: wants at least 16MiB (a number without a unit is bytes), got 4000
  pipeline.yaml:19: training: unknown key; did you mean "train"?
  --set cache.rot=x: unknown key; did you mean "root"?
  --set data.limit: wants KEY=VALUE, such as data.limit=10
  next: correct it, then: pipeline config check"""


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(complaint: Any) -> None:
    assert complaint(EVERYTHING_WRONG, "cache.rot=x", "data.limit") == ALL_COMPLAINTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "data.path: is required"),
        ("# only a comment\n", "pipeline.yaml: data.path: is required"),
        ("cache: {root: x}\ndata:\n", "pipeline.yaml:2: data.path: is required"),
        ("- data\n", "pipeline.yaml:1: the file must hold keys"),
        ("just words\n", "pipeline.yaml:1: the file must hold keys"),
        ("data: 5\n", "pipeline.yaml:1: data: wants keys below it, got 5"),
        ("data: [1]\n", "pipeline.yaml:1: data: wants keys below it, got [1]"),
        ("data:\n\tpath: a\n", "pipeline.yaml:2: no valid YAML: YAML wants spaces, not tabs"),
        ("data:\n  path: a\n limit: 3\n", "pipeline.yaml:3: no valid YAML: this line stands further left"),
        ("data:\n  path: a\n  pattern: *.pdb\n", "pipeline.yaml:3: no valid YAML: a value that begins with *"),
        ("data: {path: a}\ncache:\n  root: x: y\n", "pipeline.yaml:3: no valid YAML: a value with a colon"),
        ("data: {path: a}\n---\ndata: {path: b}\n", "pipeline.yaml:2: no valid YAML"),
        ("data: {path: a}\n? [x, y]\n: 3\n", "pipeline.yaml:2: a key must be a word"),
        ("data: !!python/object/apply:os.system [ls]\n", "data: the tag tag:yaml.org,2002:python/object/apply"),
        ("data: {path: !include other}\n", "pipeline.yaml:1: data.path: the tag !include is not allowed"),
        ("data: {path: a, limit: !!int x}\n", "data.limit: x is no valid int"),
        ("data: {path: a, max_rejected_fraction: 1e999}\n", "1e999 is no valid float"),
        ("data: {path: a, limit: yes}\n", 'data.limit: wants a whole number, got "yes"'),
        ("data: {path: a, limit: true}\n", "data.limit: wants a whole number, got true"),
        ("data: {path: a, limit: 0}\n", "data.limit: wants at least 1, got 0"),
        (f"data: {{path: a}}\ntrain: {{seed: {2**64}}}\n", "train.seed: wants at most 1e+18, got"),
        ("data: {path: a, limit: 2.0}\n", "data.limit: wants a whole number, got 2.0"),
        ("data: {path: a, pattern: '*.pdb'}\n", 'data.pattern: wants a list, such as [A, B], got "*.pdb"'),
        ("data: {path: a, pattern: []}\n", "data.pattern: wants a list that is not empty, got []"),
        ("data: {path: a, receptor_chains: [A, '']}\n", 'receptor_chains: wants some text, got ""'),
        ("data: {path: a, receptor_chains: [true]}\n", "got true: unquoted, YAML reads a truth value"),
        ("data: {path: ''}\n", "data.path: a path cannot be empty"),
        ('data: {path: "a\\0b"}\n', "data.path: a path cannot hold a NUL"),
        ("data: {path: a}\ncluster: {slots: {cpus: 0}}\n", "cpus: wants a whole number from 1, or auto, got 0"),
        ("data: {path: a}\ncluster: {slots: {mem: 64}}\n", "mem: wants at least 16MiB (a number without a unit"),
        (
            "data: {path: a}\ncluster: {slurm: {container: {binds: [data]}}}\n",
            'wants FOLDER, FOLDER:INSIDE or FOLDER:INSIDE:ro, from / or a variable on, got "data"',
        ),
        ("data: {path: a}\ncluster: {executor: slrm}\n", 'executor: wants one of local, slurm, got "slrm"'),
        (b"data: {path: a}\n# \xff\n", "pipeline.yaml:2: not UTF-8: byte 0xff"),
        (b"data: {path: a}\n# \x07\n", "pipeline.yaml:2: no valid YAML: the character '\\x07'"),
        (b"\xff\xfed\x00a\x00", "pipeline.yaml:1: not UTF-8"),
    ],
)
def test_mistake_is_named_with_its_line(complaint: Any, text: str | bytes, said: str) -> None:
    assert said in complaint(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{mem: 4G, mem_per_gpu: 4G, gpus: 1}", "pipeline.yaml:2: cluster.scan.mem_per_gpu: excludes mem"),
        ("{mem_per_gpu: 4G}", "pipeline.yaml:2: cluster.scan.mem_per_gpu: means nothing where gpus is 0"),
    ],
)
def test_conflict_points_at_the_key_that_is_too_many(complaint: Any, text: str, said: str) -> None:
    assert said in complaint(f"data: {{path: a}}\ncluster: {{scan: {text}}}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{micro_batch: 16}", "pipeline.yaml:2: train.micro_batch: 16 is more than effective_batch, 8"),
        (
            "{epochs: 1, curriculum: [{epochs: 2, largest: {nodes: 9}}]}",
            "train.curriculum: leaves none of the 1 epochs",
        ),
        ("{curriculum: [{epochs: 2}]}", "says nothing that differs: add largest, smallest or options"),
        ("{task: lab.Task}", "train.task: wants package.module:Name"),
        ("{checkpointing: always}", "train.checkpointing: "),
    ],
)
def test_training_settings_that_contradict_each_other_are_told(complaint: Any, text: str, said: str) -> None:
    assert said in complaint(f"data: {{path: a}}\ntrain: {text}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source: fasta, ligand: smaller", "data.ligand: is for complexes, and data.source: fasta gives sequences"),
        ("ligand: small", 'data.ligand: wants one of as_named, swapped, smaller, larger, got "small"'),
        ("source: reader, reader: 'a:B', ligand: larger", "data.ligand: is for structures"),
    ],
)
def test_a_choice_of_ligand_is_for_complexes(complaint: Any, text: str, said: str) -> None:
    assert said in complaint(f"data: {{path: a, {text}}}\n")


def test_chain_on_both_sides_is_a_conflict(complaint: Any) -> None:
    text = "data:\n  path: a\n  receptor_chains: [H, L]\n  ligand_chains: [A, L]\n"
    assert "pipeline.yaml:4: data.ligand_chains: L is also in receptor_chains" in complaint(text)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("data.limt=5", '--set data.limt=5: unknown key; did you mean "limit"?'),
        ("data.limit=five", '--set data.limit=five: wants a whole number, got "five"'),
        ("data.pattern=*.pdb", "--set data.pattern=*.pdb: no valid YAML: a value that begins with * must"),
        ("data.pattern.0=x", "--set data.pattern.0=x: data.pattern: wants a list"),
        (
            "cluster.scan={mem: 4G, cpu: 1}",
            "--set cluster.scan={mem: 4G, cpu: 1}: cluster.scan.cpu: unknown key; did you",
        ),
        ("=5", "--set =5: wants KEY=VALUE"),
        ("data..limit=5", "--set data..limit=5: wants KEY=VALUE"),
        ("evaluate.metric=x", "--set evaluate.metric=x: evaluate: unknown key"),
    ],
)
def test_typed_mistake_repeats_what_was_typed(complaint: Any, typed: str, said: str) -> None:
    assert said in complaint("data: {path: a, limt: 1}\n", typed)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("data: {path: a}\ntrain: {epochs: 1e400}\n", "train.epochs"),
        ("data: {path: a, pattern: [b, 1e400]}\n", "data.pattern"),
        ("data: {path: a, limit: !!int x}\n", "data.limit"),
    ],
)
def test_what_is_no_value_of_yaml_is_one_mistake(complaint: Any, text: str, key: str) -> None:
    told = complaint(text)
    assert f"{key}: " in told
    assert "is no valid" in told
    assert "problems" not in told


BOMB = "data: {path: a}\na: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(BOMB, id="aliases that multiply"),
        pytest.param("data: &a {path: *a}\n", id="an alias of itself"),
        pytest.param("data: &a [*a]\n", id="a list in itself"),
        pytest.param("data: " + "[" * 5000, id="nested brackets"),
        pytest.param("data: {path: a}\n" + "#" * (300 << 10), id="a large file"),
        pytest.param("data: {path: a, limit: " + "9" * 5000 + "}\n", id="a number of 5,000 digits"),
        pytest.param("data: {path: a}\n" + "x" * 3000 + ": 1\n", id="a key of 3,000 letters"),
    ],
)
def test_hostile_file_is_refused_soon_and_briefly(complaint: Any, text: str) -> None:
    said: list[str] = []
    assert calls_of(lambda: said.append(complaint(text))) < 400_000
    assert len(said[0]) < 800


def test_missing_or_unreadable_file_is_a_configuration_error(project: Path) -> None:
    for path in (Path("gone.yaml"), project):
        with pytest.raises(ConfigError, match="cannot read it"):
            read_config(path)


def test_text_that_is_no_unicode_is_refused_without_a_traceback(complaint: Any) -> None:
    assert r"data.receptor_chains: \ud800 is no valid str" in complaint(
        'data: {path: a, receptor_chains: ["\\ud800"]}\n'
    )


def test_quotes_that_a_shell_would_take_away_are_shown_with_the_shells_own() -> None:
    with pytest.raises(ConfigError, match=r"""put it in quotes: --set 'structures.assembly="1"'"""):
        read_config(None, ["data.path=x", "structures.assembly=1"])
    with pytest.raises(ConfigError, match=r"""put it in quotes: --set 'data.path=""'"""):
        read_config(None, ["data.path="])
    assert read_config(None, ["data.path=x", 'structures.assembly="1"']).config.structures.assembly == "1"
