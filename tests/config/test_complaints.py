"""Every mistake is named with its line, its value and what was meant, and all of them at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.errors import ConfigError
from tests.testkit.counted import calls_of

GOLDEN = Path(__file__).with_name("complaints.txt")
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


def scan(settings: str) -> str:
    return f"data: {{path: a}}\ncluster: {{scan: {settings}}}\n"


def train(settings: str) -> str:
    return f"data: {{path: a}}\ntrain: {settings}\n"


def under(settings: str) -> str:
    return f"data: {{path: a}}\ncache:\n  {settings}\n"


def value(name: str, value: str) -> str:
    return f"data: {{path: a, {name}: {value}}}\n"


# Each has one mistake; what is said of it is in complaints.txt.
MISTAKES: list[str | bytes] = [
    "",
    "# only a comment\n",
    "cache: {root: x}\ndata:\n",
    "- data\n",
    "just words\n",
    "data: 5\n",
    "data: [1]\n",
    "data:\n\tpath: a\n",
    "data:\n  path: a\n limit: 3\n",
    "data:\n  path: a\n  pattern: *.pdb\n",
    "data: {path: a}\ncache:\n  root: x: y\n",
    "data: {path: a}\n---\ndata: {path: b}\n",
    "data: {path: a}\n? [x, y]\n: 3\n",
    "data: !!python/object/apply:os.system [ls]\n",
    "data: {path: !include other}\n",
    "data: {path: ''}\n",
    'data: {path: "a\\0b"}\n',
    *(value("limit", given) for given in ("!!int x", "yes", "true", "0", "2.0")),
    value("max_rejected_fraction", "1e999"),
    *(value("pattern", given) for given in ("'*.pdb'", "[]", "[b, 1e400]")),
    *(value("receptor_chains", given) for given in ("[A, '']", "[true]", '["\\ud800"]')),
    "data:\n  path: a\n  receptor_chains: [H, L]\n  ligand_chains: [A, L]\n",
    "data: {path: a, source: fasta, ligand: smaller}\n",
    value("ligand", "small"),
    "data: {path: a, source: reader, reader: 'a:B', ligand: larger}\n",
    *(scan(given) for given in ("{mem: 4G, mem_per_gpu: 4G, gpus: 1}", "{mem_per_gpu: 4G}")),
    f"data: {{path: a}}\ntrain: {{seed: {2**64}}}\n",
    train("{epochs: 1e400}"),
    train("{micro_batch: 16}"),
    train("{epochs: 1, curriculum: [{epochs: 2, largest: {nodes: 9}}]}"),
    train("{curriculum: [{epochs: 2}]}"),
    train("{task: lab.Task}"),
    train("{checkpointing: always}"),
    *(
        under(given)
        for given in ("stage: scratch", "stage: 7", "under: shared", "under: [$NOT_SET_HERE/x]", "under: ['']")
    ),
    "data: {path: a}\ncluster: {slots: {cpus: 0}}\n",
    "data: {path: a}\ncluster: {slots: {mem: 64}}\n",
    "data: {path: a}\ncluster: {slurm: {container: {binds: [data]}}}\n",
    "data: {path: a}\ncluster: {executor: slrm}\n",
    "data: {path: a}\ntrain:\n  batch_size: 4\n",
    b"data: {path: a}\n# \xff\n",
    b"data: {path: a}\n# \x07\n",
    b"\xff\xfed\x00a\x00",
]
TYPED = (
    "data.limt=5",
    "data.limit=five",
    "data.pattern=*.pdb",
    "data.pattern.0=x",
    "cluster.scan={mem: 4G, cpu: 1}",
    "=5",
    "data..limit=5",
    "evaluate.metric=x",
    "structures.assembly=1",
    "data.path=",
    "cluster.site=genric",
    "cluster.site=[a]",
    "cluster.site=3",
    "cluster.site=''",
    "cluster.site=a/$NOWHERE/b",
)
PROFILES = (
    "slurm:\n  partion: gpu\n",
    "slurm:\n  gpus: grs\n",
    "slurm:\n  grace: 90\n",
    "slurm: 3\n",
    "slrum:\n  partition: gpu\n",
    "partition: gpu\n",
    "executor: slurm\n",
    "cluster:\n  slurm: {}\n",
    "just words\n",
    "slurm: {\n",
    "slurm:\n  name: a\n  name: b\n",
    "slurm:\n  cards:\n    - {gres: a100}\n",
    "slurm:\n  cards: [{mem: 1GiB}, {mem: 1GiB, gers: a}]\n",
    "slurm:\n  cards: [{mem: 1}]\n",
)


def test_every_mistake_is_told_with_its_place_as_written_down(complaint: Any, project: Path) -> None:
    """With PIPELINE_TEST_WRITE=1 what is said is written down again."""
    bad, site = project / "sites/bad.yaml", "data: {path: a.csv}\ncluster: {site: bad}\n"
    said = [f"{EVERYTHING_WRONG}\n" + complaint(EVERYTHING_WRONG, "cache.rot=x", "data.limit")]
    said += [f"{text!r}\n" + complaint(text) for text in MISTAKES]
    said += [f"--set {typed}\n" + complaint("data: {path: a, limt: 1}\n", typed) for typed in TYPED]
    bad.parent.mkdir()
    for text in PROFILES:
        bad.write_text(text)
        said.append(f"{bad.name}: {text!r}\n" + complaint(site))
    text = "\n\n".join(said) + "\n"
    if os.environ.get("PIPELINE_TEST_WRITE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert [one for one in said if ".yaml" not in one and "--set" not in one] == []


BOMB = "data: {path: a}\na: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_hostile_file_is_refused_soon_and_briefly(complaint: Any) -> None:
    for text in [
        BOMB,
        "data: &a {path: *a}\n",
        "data: &a [*a]\n",
        "data: " + "[" * 5000,
        "data: {path: a}\n" + "#" * (300 << 10),
        "data: {path: a, limit: " + "9" * 5000 + "}\n",
        "data: {path: a}\n" + "x" * 3000 + ": 1\n",
    ]:
        said: list[str] = []
        assert calls_of(lambda said=said, text=text: said.append(complaint(text))) < 400_000, text[:60]
        assert len(said[0]) < 800, text[:60]


def test_missing_or_unreadable_file_is_a_configuration_error(project: Path) -> None:
    for path in (Path("gone.yaml"), project):
        with pytest.raises(ConfigError, match="cannot read the configuration"):
            read_config(path)
