"""No text of the configuration reaches a shell: every setting that holds text is filled with what a shell would run.

The settings are found by walking the schema, so a new one is tested by being there. Scripts are rendered as `submit`
renders them, and run by bash with a stand-in for srun; commands of this machine are run as the program runs them.
"""

from __future__ import annotations

import json
import subprocess
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline.cluster import sbatch
from pipeline.cluster.job_spec import TASK
from pipeline.config.load import read_config
from pipeline.config.schema import LEAVES, Config
from pipeline.config.schema_cluster import CardSection, NotifySection
from pipeline.config.schema_train import CurriculumSection
from pipeline.engine.handover import supervisor_job
from pipeline.engine.notices import notify
from pipeline.errors import ConfigError, SubmissionRefused
from pipeline.journal.attempts import Ask
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import StageJob
from pipeline.script.command import parse_command
from pipeline.stages.jobs import job_of
from tests.testkit.stubs import program, silent_slurm

MADE = "made-by-the-setting"
HOSTILE = {
    "a line": "--x$(touch MADE)`touch MADE`${IFS}; touch MADE & touch MADE #'; touch MADE; ' \"; touch MADE; \"",
    "lines": "x\ntouch MADE\n#SBATCH --wrap=true\n# <<< command\ntouch MADE\n# >>> command",
    "a folder": "/x$(touch MADE)/`touch MADE`/;touch MADE;\n touch MADE;'\"",
}
BY_PURPOSE = {  # these are shell, and their description says so
    ("cluster", "slurm", "setup"): "the lines that every job runs first: who writes the configuration writes them",
}
BESIDE: dict[tuple[str, ...], dict[str, Any]] = {  # without these a setting means nothing
    ("data", "reader"): {"data.source": "reader"},
    ("data", "options"): {"data.source": "reader", "data.reader": "a:B"},
}
NEXT = "\n"
ENDS = (NEXT, *"\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")  # what ends a line for bash, sbatch or Python
STAGES = ("train",)  # the bodies of all scripts are alike (tests/cluster/test_sbatch.py)


NEEDED: dict[type[BaseModel], dict[str, Any]] = {
    CardSection: {"mem": "1GiB"},
    CurriculumSection: {"epochs": 1, "largest": {"nodes": 1}},
}


def slots(annotation: Any, text: str) -> Iterator[Any]:
    """Yield values of a type, a text in each place that can hold one."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (str, Path, Any):
        yield text
    elif origin is typing.Annotated:
        yield from slots(parts[0], text)
    elif origin in (typing.Union, types.UnionType):
        yield from (value for part in parts for value in slots(part, text))
    elif origin is tuple:
        yield from ([value] for value in slots(parts[0], text))
    elif origin is dict:
        yield from ({value: 1} for value in slots(parts[0], text))
        yield from ({"name": value} for value in slots(parts[1], text))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from slots_of(annotation, text)


def slots_of(model: type[BaseModel], text: str) -> Iterator[dict[str, Any]]:
    """Yield values of a section in a list, a text in each place."""
    needed = NEEDED.get(model, {})
    fields = {name: info for name, info in model.model_fields.items() if info.annotation != dict[str, model]}
    for name, info in fields.items():
        yield from ({**needed, name: value} for value in slots(info.annotation, text))


TEXTS = {key: info.annotation for key, info in LEAVES.items() if list(slots(info.annotation, "x"))}
FILLED = [key for key in TEXTS if key not in BY_PURPOSE]


def test_the_settings_that_hold_text_are_found_and_only_the_lines_of_a_site_are_shell() -> None:
    names = {".".join(key) for key in TEXTS}
    known = {"data.path", "data.options", "train.command", "train.models", "cache.under", "cluster.slurm.partition"}
    assert names >= known | {"cluster.slurm.cards", "cluster.notify.mail", "cluster.train.constraint", "cluster.runs"}
    assert len(names) > 40
    assert not [name for name in names if LEAVES[tuple(name.split("."))].annotation in (int, bool)]
    assert set(BY_PURPOSE) <= set(TEXTS)
    assert "Shell lines" in (LEAVES["cluster", "slurm", "setup"].description or "")


def configured(folder: Path, key: tuple[str, ...], value: Any) -> Config:
    """Return a configuration with one setting, as it is read from a file."""
    said = {"data.path": "data.csv", "cluster.executor": "slurm", **BESIDE.get(key, {}), ".".join(key): value}
    content: dict[str, Any] = {}
    for name, one in said.items():
        *above, last = name.split(".")
        section = content
        for part in above:
            section = section.setdefault(part, {})
        section[last] = one
    (folder / "pipeline.yaml").write_text(json.dumps(content))  # JSON is YAML
    return read_config(folder / "pipeline.yaml").config


def scripts(config: Config) -> Iterator[str]:
    """Yield the scripts of a run of that configuration: its jobs, those for each kind of card, and its supervisor."""
    folder = RunFolder(config.cluster.runs / "20260101-0000")
    site = config.cluster.slurm
    cards = [("", "", ""), *((card.gres or "", card.feature or "", card.partition or "") for card in site.cards)]
    specs = [supervisor_job(folder, config, "1")]
    for stage in STAGES:
        for card, feature, partition in cards:
            job = StageJob(
                f"{folder.name}-{stage}-0", stage, "0", 1, Ask(1 << 30, 600), gpus=1, card=card, constraint=feature,
                partition=partition,
            )  # fmt: skip
            specs.append(job_of(folder, config, job))
    for spec in specs:
        assert all(isinstance(word, str) or word is TASK for word in spec.argv)
        yield sbatch.render(sbatch.template(spec.name, ranks=spec.request.ranks), spec, site)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of programs that stand for Slurm's; scripts run in a folder `here` of their own beside it."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "here").mkdir()
    return silent_slurm(folder / "bin")


def ran(node: Path, text: str) -> bool:
    """Run a script, and say whether it made what the hostile texts want to make."""
    said = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "1", "SAID": str(node.parent / "said")}
    here = node.parent / "here"
    subprocess.run(
        ["bash"], input=text.encode(), cwd=here, env={"PATH": f"{node}:/usr/bin:/bin", **said}, capture_output=True,
        check=False,
    )  # fmt: skip
    made = list(here.iterdir())
    for path in made:
        path.unlink()
    return bool(made)


def test_the_texts_would_be_run_by_a_shell(node: Path) -> None:
    for name, text in HOSTILE.items():
        assert ran(node, f"echo {text.replace('MADE', MADE)}\n"), name


@pytest.mark.nightly
def test_no_setting_is_run_by_the_scripts_of_a_run(node: Path) -> None:
    seen = set(scripts(configured(node.parent, ("data", "path"), "data.csv")))  # where nothing is hostile
    most = max(text.count("\n#SBATCH") for text in seen)
    hostile = [text.replace("MADE", MADE) for text in HOSTILE.values()]
    for key, value in [(name, value) for name in FILLED for text in hostile for value in slots(TEXTS[name], text)]:
        with suppress(ConfigError, SubmissionRefused):  # before anything is submitted: as good as harmless
            for script in set(scripts(configured(node.parent, key, value))) - seen:
                assert script.count("\n#SBATCH") <= most + 1, ("an option of sbatch came in", key, value)
                assert not ran(node, script), (key, value)


@pytest.mark.parametrize("end", ENDS, ids=ascii)
def test_no_setting_and_no_folder_ends_a_line_of_a_script(tmp_path: Path, end: str) -> None:
    text = f"--x=x{end}touch {MADE} #"
    refused = dict[tuple[str, ...], str]()
    for key, value in [(name, value) for name in FILLED for value in slots(TEXTS[name], text)]:
        try:
            printed = "".join(scripts(configured(tmp_path, key, value)))
        except ConfigError as error:
            refused[key] = str(error)
        else:
            assert printed.replace("\n", "").replace("\t", "").isprintable(), key
    assert all(".".join(key) in error for key, error in refused.items() if key[0] == "cluster")
    assert refused.keys() >= {
        ("cluster", "slurm", name) for name in ("partition", "account", "qos", "constraint", "options")
    }
    with pytest.raises(ConfigError, match="unprintable character") as caught:
        list(scripts(configured(tmp_path, ("cluster", "slurm", "setup"), [f"true{end * (end != NEXT)}\0"])))
    assert caught.value.where == "cluster.slurm.setup"
    (folder := tmp_path / f"a{end}touch {MADE}").mkdir()
    with pytest.raises(ConfigError) as caught:
        list(scripts(configured(folder, ("data", "path"), "data.csv")))
    assert (caught.value.where, "--set cluster.runs=" in str(caught.value.next)) == ("cluster.runs", True)


def test_the_words_of_a_script_of_ones_own_reach_no_shell(tmp_path: Path) -> None:
    made = tmp_path / MADE
    words = parse_command(f"printf '%s' '$(touch {made})' '`touch {made}`' 'x; touch {made}'").words
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"$(touch {made})`touch {made}`x; touch {made}"
    assert not made.exists()
    with pytest.raises(ConfigError):
        parse_command(f"python train.py ; touch {made}")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_who_is_notified_is_a_word_to_the_command_and_no_option_to_sendmail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = program(tmp_path / "bin", "tell", f'printf "%s\\0" "$@" >"{tmp_path}/told"')
    program(tmp_path / "bin", "sendmail", f'printf "%s\\0" "$@" >"{tmp_path}/mailed"; cat >/dev/null')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    hostile = text.replace("MADE", MADE)
    notify(NotifySection(command=(str(told), hostile)), RunFolder(tmp_path / "run"), "scan", "failed", hostile)
    assert (tmp_path / "told").read_text().split("\0") == [hostile, "run", "scan", "failed", hostile, ""]
    with pytest.raises(ConfigError, match="mail"):  # an address has no space and no dash before it
        configured(tmp_path, ("cluster", "notify", "mail"), hostile)
    assert not (tmp_path / MADE).exists()


@pytest.mark.nightly
def test_a_project_in_a_folder_of_any_name_gives_scripts_that_run_nothing_of_it(node: Path, tmp_path: Path) -> None:
    for place in ("a b", "a'b", "$(touch MADE)", "a;touch MADE", "-rf", "a%b", "`touch MADE`"):
        (folder := tmp_path / place.replace("MADE", MADE)).mkdir()
        for script in scripts(configured(folder, ("data", "path"), "data.csv")):
            assert not ran(node, script), place
