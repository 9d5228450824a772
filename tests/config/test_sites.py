"""A profile gives a configuration its cluster; what people write themselves beats it, and mistakes keep their place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import dump_resolved, from_resolved
from pipeline.config.schema_cluster import CardSection, SlurmSection, SupervisorSection
from pipeline.config.yaml_document import Document
from pipeline.files import shipped

EXAMPLES = sorted((Path(__file__).parents[2] / "configs/sites").glob("*.yaml"))
DATA = "data: {path: a.csv}\n"


@pytest.fixture
def profile(project: Path) -> Any:
    """Write sites/NAME.yaml beside the configuration."""

    def write(name: str, text: str, folder: str = "sites") -> Path:
        path = project / folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_what_a_profile_says_is_the_default(loaded: Any, profile: Any) -> None:
    profile("here", "slurm:\n  partition: gpu\n  grace: 2m\nsupervisor:\n  tries: 5\n")
    result = loaded(DATA + "cluster: {site: here}\n")
    assert (result.config.cluster.slurm.partition, result.config.cluster.slurm.grace) == ("gpu", 120)
    assert result.config.cluster.supervisor.tries == 5
    assert result.origins["cluster.slurm.partition"] == "sites/here.yaml:2"
    assert result.origins["cluster.slurm.account"] == "default"


def test_the_file_beats_the_profile_key_by_key_and_set_beats_both(loaded: Any, profile: Any) -> None:
    profile("here", "slurm: {partition: gpu, account: a, qos: q}\n")
    text = DATA + "cluster:\n  site: here\n  slurm: {account: mine, qos: null}\n"
    slurm = loaded(text, "cluster.slurm.partition=typed").config.cluster.slurm
    assert (slurm.partition, slurm.account, slurm.qos) == ("typed", "mine", None)


def test_the_site_may_be_typed_and_typed_away(loaded: Any, profile: Any) -> None:
    profile("here", "slurm: {partition: gpu}\n")
    profile("there", "slurm: {partition: cpu}\n")
    assert loaded(DATA, "cluster.site=here").config.cluster.slurm.partition == "gpu"
    text = DATA + "cluster: {site: here}\n"
    assert loaded(text, "cluster.site=there").config.cluster.slurm.partition == "cpu"
    assert loaded(text, "cluster.site=").config.cluster.slurm.partition is None
    assert loaded(text, "cluster={site: there}").config.cluster.slurm.partition == "cpu"


def test_a_name_is_looked_up_beside_the_configuration_then_here_then_in_the_package(loaded: Any, profile: Any) -> None:
    text = DATA + "cluster: {site: generic}\n"
    assert loaded(text).config.cluster.slurm.name == "generic"
    profile("generic", "slurm: {name: here}\n", "configs/sites")
    assert loaded(text).config.cluster.slurm.name == "here"
    profile("generic", "slurm: {name: beside}\n")
    assert loaded(text).config.cluster.slurm.name == "beside"


def test_a_path_starts_from_where_it_is_written(loaded: Any, profile: Any, project: Path) -> None:
    profile("one", "slurm: {name: one}\n", "elsewhere")
    assert loaded(DATA + "cluster: {site: elsewhere/one.yaml}\n").config.cluster.slurm.name == "one"
    assert loaded(DATA, "cluster.site=./elsewhere/one.yaml").config.cluster.slurm.name == "one"
    assert loaded(DATA, f"cluster.site={project}/elsewhere/one.yaml").config.cluster.slurm.name == "one"


def test_a_site_that_cannot_be_one_is_refused_with_the_known_ones(complaint: Any, project: Path) -> None:
    (project / "sites").mkdir()
    for site, said in {
        "mixed-gpu": "generic, mem-per-cpu, mixed-gpus",
        "MIXED-GPUS": "generic, mem-per-cpu, mixed-gpus",
        "none.yaml": "none.yaml does not exist",
        "./sites": "sites is not a file",
    }.items():
        refused = complaint(DATA + f"cluster:\n  site: {site}\n")
        assert "pipeline.yaml:3: cluster.site: " in refused
        assert said in refused


def test_all_mistakes_are_told_at_once_those_of_the_profile_first(complaint: Any, profile: Any) -> None:
    profile("bad", "\n\n\nslurm: {partion: gpu}\nsupervisor: {try: 3}\n")
    lines = complaint("data: {path: a, limt: 3}\ncluster: {site: bad}\n", "cluster.slurm.grac=3m").splitlines()
    places = [line.split()[0] for line in lines[1:-1]]
    assert places == ["sites/bad.yaml:4:", "sites/bad.yaml:5:", "pipeline.yaml:1:", "--set"]


def test_a_frozen_configuration_needs_its_profile_no_more(loaded: Any, profile: Any) -> None:
    path = profile("here", "slurm: {partition: gpu}\n")
    config = loaded(DATA + "cluster: {site: here}\n").config
    path.unlink()
    assert from_resolved(dump_resolved(config)) == config


def test_every_example_loads_is_listed_and_comes_with_the_package(loaded: Any) -> None:
    assert EXAMPLES[0].parent == shipped("configs/sites")
    listed = (EXAMPLES[0].parent / "README.md").read_text()
    for path in EXAMPLES:
        assert loaded(DATA, f"cluster.site={path.stem}").config.cluster.slurm.name == path.stem
        assert f"({path.name})" in listed


def test_the_examples_write_every_key_of_a_profile_and_every_key_of_a_card() -> None:
    generic = Document("generic").read(next(path for path in EXAMPLES if path.stem == "generic").read_text())
    assert {key[1] for key in generic.entries if key[:1] == ("slurm",) and key[1:]} == set(SlurmSection.model_fields)
    assert {key[1] for key in generic.entries if key[:1] == ("supervisor",) and key[1:]} == set(
        SupervisorSection.model_fields
    )
    text = "".join(path.read_text() for path in EXAMPLES)
    assert all(re.search(rf"[{{ ]{key}: ", text) for key in CardSection.model_fields)


def test_the_generic_example_says_the_defaults_and_explains_each(loaded: Any) -> None:
    cluster = loaded(DATA, "cluster.site=generic", "cluster.slurm.name=slurm").config.cluster
    assert (cluster.slurm, cluster.supervisor) == (SlurmSection(), SupervisorSection())
