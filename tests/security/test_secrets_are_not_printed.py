"""Passwords in addresses, keys and tokens in settings and in the environment: in no output, script, event or log.

The frozen configuration of a run holds its settings as they are, since jobs need them: it is its owner's alone
(test_private_by_default.py). Lines of `cluster.slurm.setup` are part of the scripts, as they were written.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from pipeline import command_line
from pipeline.cli.options import MaskedLines
from pipeline.config.load import read_config
from pipeline.config.masking import MASK, without_secrets, without_secrets_in
from pipeline.engine import supervisor, worker
from pipeline.engine.lifecycle import new_run
from pipeline.engine.notices import notify
from pipeline.errors import JobFailed
from pipeline.journal.ledger import Ledger, LedgerReader
from pipeline.journal.run_folder import RunFolder
from pipeline.records import EventKind
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.command import Command
from tests.testkit.stubs import program, silent_slurm

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOp",
    "DATABASE_PASSWORD": "correct-horse",
    "SOME_SECRET": "s3cr3ts3cr3t",
}
PASSWORD, TOKEN, OPTION = "hunter2-of-the-url", "token-of-the-hook", "key-of-the-task"
CONFIG = f"""
data: {{source: glob, path: data}}
train: {{task: "no.such:Task", options: {{api_key: {OPTION}, url: "https://me:{PASSWORD}@host/x"}}}}
cluster:
  runs: runs
  notify: {{command: ["./tell", "https://me:{PASSWORD}@hooks/x", "--token", "{TOKEN}"]}}
"""
ALL = (*SECRETS.values(), PASSWORD, TOKEN, OPTION)


@pytest.fixture
def project(tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project whose settings and environment hold secrets, and a hook that repeats its own when it fails."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.pdb").write_bytes(complex_pdb(0, 40, 41))
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    program(tmp_path, "tell", 'echo "cannot reach $1 with $3 nor $HF_TOKEN" >&2; exit 3')
    return tmp_path


def found(text: str) -> list[str]:
    """Return the secrets in a text."""
    return [secret for secret in ALL if secret in text]


def test_the_secrets_are_there_to_be_found(project: Path) -> None:
    config = read_config(project / "pipeline.yaml").config
    assert set(found(config.model_dump_json())) == {PASSWORD, TOKEN, OPTION}
    assert found(str(dict(os.environ))) == list(SECRETS.values())


def test_what_is_configured_is_shown_without_them(pipeline: Command, project: Path) -> None:
    for words in [("config", "show"), ("config", "show", "--json"), ("doctor",), ("doctor", "--json")]:
        told = pipeline(*words)
        assert found(told.out + told.err) == [], words
        if words[0] == "config":
            assert MASK in told.out, words
            assert "hooks/x" in told.out.replace("\n", ""), words
            assert "api_key" in told.out, words


def test_an_error_quotes_what_was_typed_without_them_with_or_without_a_traceback(
    pipeline: Command, project: Path
) -> None:
    for words in ((), ("--debug",)):
        told = pipeline(*words, "config", "check", "--set", f"train.optons.api_key={OPTION}")
        assert told.code == 2
        assert found(told.err) == []
        told = pipeline(*words, "weights", "fetch", "--url", f"https://me:{PASSWORD}@localhost:1/esm2.pt?token={TOKEN}")
        assert told.code
        assert found(told.err + told.out) == []


def test_a_run_leaves_none_of_them_but_in_its_frozen_configuration(pipeline: Command, project: Path) -> None:
    done = pipeline(
        "submit", "--stage", "scan", "--executor", "local", "--follow", "--set", f"train.options.api_key={OPTION}"
    )
    assert done.code == 0, done.err
    shown = [done, pipeline("status", "--json"), pipeline("report"), pipeline("report", "--json"), pipeline("logs")]
    assert [found(one.out + one.err) for one in shown] == [[]] * len(shown)
    (run,) = (project / "runs").glob("2*")
    files = [path for path in run.rglob("*") if path.is_file()]
    assert "api_key=***" in (run / "again.txt").read_text()
    assert {path.name for path in files if found(path.read_text("latin-1"))} == {"config.json"}
    beside = [path for path in (project / "runs").rglob("*") if path.is_file() and run not in path.parents]
    assert [path for path in beside if found(path.read_text("latin-1"))] == []


def test_scripts_hold_none_of_the_environment(
    pipeline: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{silent_slurm(project / 'bin')}:{os.environ['PATH']}")
    assert pipeline("submit", "--stage", "scan", "--executor", "slurm", "--emit", "scripts").code == 0
    texts = [path.read_text() for path in (project / "scripts").iterdir()]
    assert len(texts) == 2
    assert [found(text) for text in texts] == [[], []]


def test_a_hook_that_fails_is_logged_without_them(
    project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    notify(read_config(project / "pipeline.yaml").config.cluster.notify, RunFolder(project / "run"), "scan", "done", "")
    assert "cannot reach https://me:***@hooks/x" in caplog.text
    assert found(caplog.text) == []


def test_an_exception_that_quotes_one_is_an_event_without_it(project: Path) -> None:
    typed = command_line.Command.read(f"pipeline submit --set x.token={TOKEN}")
    run = new_run(read_config(project / "pipeline.yaml").config, ["scan"], typed)
    ledger = Ledger(run, "supervisor-1")
    what = f"ConnectionError: https://me:{PASSWORD}@host: key {SECRETS['WANDB_API_KEY']} refused"
    ledger.emit(EventKind.TASK_FAILED, stage="train", task=0, what=what, exit_code=1, trouble="")
    ledger.emit(EventKind.RUN_ENDED, state="failed", error=what, exit_code=7)
    ledger.close()
    events = list(LedgerReader(run).fresh())
    assert [found(json.dumps(event.data)) for event in events] == [[], []]
    assert events[0].data["what"].startswith("ConnectionError: https://me:***@host")
    assert found(run.again.read_text()) == []
    shutil.rmtree(run.path)


@pytest.mark.parametrize("error", [ValueError, JobFailed])
def test_what_a_job_and_a_supervisor_print_when_they_fail_is_without_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    def fail(*_given: object, **_named: object) -> None:
        raise error(f"cannot reach https://me:{PASSWORD}@host with api_key={OPTION} nor {os.environ['HF_TOKEN']}")

    run = new_run(read_config(project / "pipeline.yaml").config, ["scan"])
    monkeypatch.setattr(worker, "FORWARDED", ())
    monkeypatch.setattr(worker, "work_through", fail)
    monkeypatch.setattr(supervisor, "stop_on_signals", lambda: None)
    monkeypatch.setattr(supervisor.Supervisor, "run", fail)
    codes = worker.main([str(run.path), "scan", "0"]), supervisor.main([str(run.path)])
    assert codes == (getattr(error, "exit_code", 1),) * 2
    told = capsys.readouterr().err
    assert told.count("cannot reach https://me:***@host with api_key=*** nor ***") == 2
    assert found(told) == []


def test_a_log_line_of_a_library_is_written_without_them() -> None:
    record = logging.LogRecord("urllib3", logging.DEBUG, "", 1, "GET https://me:%s@host", (PASSWORD,), None)
    assert MaskedLines("%(message)s").format(record) == "GET https://me:***@host"


def test_what_is_no_secret_is_left_as_it_is() -> None:
    for text in [
        "at most 4,096 tokens",
        "embed.batch.policy=tokens",
        "tokens: 4096",
        "a token of the file is missing",
        "git@host:lab/x",
        "ssh://git@host/x",
        "the key of a record: 0123456789abcdef",
        "https://host/x@y:z",
        "left.token 128",
        "train.py --mask-token 32",
        "mask_token: '<mask>'",
        "sizes: nodes 300, left.token: 12345",
        "models/hf_esm2_t33_650M_UR50D",
        "risk-of-bias-in-16-domains-of-proteins",
        "python train.py -u a:b",
        "https://host/docs/a/long/path?page=12",
    ]:
        assert without_secrets(text) == text, text


def test_a_secret_is_told_by_its_name_or_its_place() -> None:
    for text, shown in [
        ("https://me:pass@host/x", "https://me:***@host/x"),
        ("https://:pass@host/x", "https://:***@host/x"),
        ("https://ghp_0123456789abcdefghij@host/x", "https://***@host/x"),
        ("curl --token abcdefgh x", "curl --token *** x"),
        ("--api-key=abcdefgh", "--api-key=***"),
        ("export WANDB_API_KEY='abcdefgh'", "export WANDB_API_KEY='***'"),
        ('{"password": "abcdefgh", "a": 1}', '{"password": "***", "a": 1}'),
        ("mysql --password x -h host", "mysql --password *** -h host"),
        ("password=hunter", "password=***"),
        ("wandb login 0123abcd && python train.py", "wandb login *** && python train.py"),
        ("hf_AbCdEfGhIjKlMnOpQr and ghp_0123456789abcdefghij", "hf_*** and ghp_***"),
        ("key sk-proj-0123456789abcdef_gh", "key sk-***"),
        ("curl -s -u me:pass 'https://host'", "curl -s -u me:*** 'https://host'"),
        ("curl -H 'Authorization: Bearer abcdefgh' x", "curl -H 'Authorization: Bearer ***' x"),
        ("https://hooks.slack.com/services/T0/B0/abcd", "https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/12/abcd", "https://discord.com/api/webhooks/***"),
        ("/x?X-Amz-Signature=abcdefgh&y=1", "/x?X-Amz-Signature=***&y=1"),
        ("--set 'a.api_key=two words, [three]' --set 'b=1 2'", "--set 'a.api_key=***' --set 'b=1 2'"),
    ]:
        assert without_secrets(text) == shown, (text, shown)


def test_nested_settings_are_masked_by_the_name_above_them() -> None:
    told = {"options": {"api_token": "x", "many": ["https://a:b@c", 3]}, "password": ["one", "two"], "n": None}
    assert without_secrets_in(told) == {
        "options": {"api_token": MASK, "many": ["https://a:***@c", 3]}, "password": [MASK, MASK], "n": None
    }  # fmt: skip
    shown = {"largest": {"left.token": 128}, "use_token": True, "command": ["curl", "-u", MASK], "n": 3}
    shown |= {"mask_token": 32, "notify": ["python", "-u", "tell.py"]}
    shown |= dict.fromkeys(("api_key", "wandb_key", "Authorization", "slack_webhook"), MASK)
    told = {"api_key": 1234567, "wandb_key": "x", "Authorization": "Bearer x", "slack_webhook": "https://x/y"}
    assert without_secrets_in({**shown, **told, "command": ["curl", "-u", "me:pass"]}) == shown


def test_a_complaint_about_a_setting_does_not_quote_a_secret(pipeline: Command, project: Path) -> None:
    for setting in (
        "train.options.api_key={value: [[" + OPTION + "]]}",
        f"cluster.notify.command=curl -H 'Authorization: Bearer {OPTION}' x",
        f"cluster.slurm.container.env.WANDB_KEY=[{OPTION}]",
        f"train.options.password=!!int {OPTION}",
    ):
        told = pipeline("config", "check", "--set", setting)
        assert told.code == 2, setting
        assert found(told.err) == [], (setting, told.err)


def test_a_text_of_long_words_is_gone_through_at_once() -> None:
    """What looks for names in a sequence that an error quotes must not begin at each letter: this would take hours."""
    long, option = "A" * 1_000_000, "--" + "a-" * 500_000
    assert without_secrets(f"{long} {option} api_key={OPTION}") == f"{long} {option} api_key={MASK}"
