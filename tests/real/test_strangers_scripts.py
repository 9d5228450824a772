"""Two training scripts as other people write them run unchanged, as docs/how-to/own_script.md says.

`strangers/nanogpt` takes --key=value, resumes from its own ckpt.pt and does not save the state of its random numbers.
So a killed run cannot equal one without a break. It equals two commands typed by hand: train to the checkpoint, then
resume. A smaller micro-batch draws other numbers too: there the equal run has that batch from the start.

`strangers/word_language_model` has neither accumulation nor a way to resume. A retry starts over and gives the
weights of a run without a break.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pipeline.cluster.machine import THREADS
from tests.docs.blocks import Page
from tests.testkit.command import Typed
from tests.testkit.limited import device
from tests.testkit.project import PIPELINE, Project

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = Page(ROOT / "docs/how-to/own_script.md")
SUBMIT = ("submit", "train", "--only", "--executor", "local", "--follow")
PATIENCE_S = 300.0
TINY = "device, compile = 'cpu', False\nblock_size, n_embd, eval_iters, eval_interval = 32, 32, 2, 10\n"
LOGS = "    if iter_num % log_interval == 0:\n"
STEP = """    print('pipeline: {"step": %d, "loss": %f}' % (iter_num, loss.item() * gradient_accumulation_steps))\n"""
HAND = "train.py config/tiny.py --batch_size={} --gradient_accumulation_steps={} --max_iters={} --out_dir=hand"
WORDS = "main.py --data data/docs --emsize 16 --nhid 16"
SMALL = """\
import sys
if sys.orig_argv[1:2] in (["train.py"], ["main.py"]):
    sys.path.append({root!r})
    from tests.testkit.limited.device import LimitedDevice
    sys.path.remove({root!r})
    small = LimitedDevice({limit})
    small.__enter__()
"""


def text() -> str:
    """Return some English: the pages of docs/how-to."""
    return "".join(page.read_text() for page in sorted((ROOT / "docs/how-to").glob("*.md")))


@pytest.fixture
def gpt(tmp_path: Path) -> Project:
    """Return a checkout of nanoGPT."""
    return Project(checked_out(tmp_path / "nanoGPT"))


def checked_out(folder: Path) -> Path:
    """Write nanoGPT, and the data that its prepare.py makes."""
    shutil.copytree(Path(__file__).with_name("strangers") / "nanogpt", folder)
    data, letters = folder / "data/chars", sorted(set(text()))
    data.mkdir(parents=True)
    ids = np.array([letters.index(letter) for letter in text()], dtype=np.uint16)
    ids[5000:].tofile(data / "train.bin")
    ids[:5000].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))
    (folder / "config").mkdir()
    (folder / "config/tiny.py").write_text(TINY)
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Project:
    """Return a checkout of pytorch/examples' word_language_model with a small corpus."""
    folder = tmp_path / "word_language_model"
    shutil.copytree(Path(__file__).with_name("strangers") / "word_language_model", folder)
    data, lines = folder / "data/docs", text().splitlines(keepends=True)
    data.mkdir(parents=True)
    for number, name in enumerate(("train", "valid", "test")):
        (data / f"{name}.txt").write_text("".join(lines[300 * number : 300 * (number + 1)]))
    return Project(folder)


def configured(project: Project, more: str, **train: Any) -> None:
    """Write pipeline.yaml: what the page says for nanoGPT, with more words at the end of the command."""
    settings = yaml.safe_load(PAGE.files()["resume.yaml"])
    settings["train"] |= {"command": f"{settings['train']['command']} config/tiny.py {more}", **train}
    (project.folder / "pipeline.yaml").write_text(yaml.safe_dump(settings))


def commanded(project: Project, command: str, **train: Any) -> None:
    """Write pipeline.yaml: a plain command."""
    settings = {"data": {"source": "glob", "path": "."}, "train": {"command": command, **train}}
    (project.folder / "pipeline.yaml").write_text(yaml.safe_dump(settings))


def small(project: Project, limit_bytes: int) -> dict[str, str]:
    """Return the environment in which a script finds a device of so much memory, in place of a GPU."""
    device.need()
    beside = project.folder.parent / "small"
    beside.mkdir()
    (beside / "sitecustomize.py").write_text(SMALL.format(root=str(ROOT), limit=limit_bytes))
    return {"PYTHONPATH": str(beside)}


def by_hand(project: Project, words: str) -> None:
    """Type the script's own command line."""
    known = {**os.environ, **dict.fromkeys(THREADS, "1")}
    subprocess.run([sys.executable, *words.split()], cwd=project.folder, env=known, check=True, capture_output=True)


def causes(project: Project) -> list[str]:
    """Return why attempts of the newest run failed."""
    return [failure["cause"] for failure in status(project)["failures"]]


def status(project: Project) -> Any:
    """Return the stage train of the newest run."""
    (stage,) = project.types("status", "--json").json()["stages"]
    return stage


def output(project: Project) -> Path:
    """Return {output}."""
    return Path(project.types("plan", "train", "--json").json()[0]["output"])


def equal(one: Any, other: Any) -> bool:
    """Tell whether two checkpoints of nanoGPT hold the same, except for the command line."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one if key != "config")
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def weights(path: Path) -> list[bytes]:
    """Return the tensors of a pickled model, without loading it."""
    with zipfile.ZipFile(path) as file:
        names = sorted(name for name in file.namelist() if "/data/" in name)
        assert names
        return [file.read(name) for name in names]


def killed(project: Project, script: str, until: Path, times: int = 1) -> Typed:
    """Submit, kill the script each time it has written a whole file, and wait for the end of the run."""
    known = {**os.environ, "PATH": f"{PIPELINE.parent}:{os.environ['PATH']}"}
    started = subprocess.Popen(
        [PIPELINE, *SUBMIT], cwd=project.folder, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ends_at, written_at, dead = time.monotonic() + PATIENCE_S, 0, set[int]()
    for _ in range(times):
        while not (alive := {*pids(project.folder, script)} - dead) or not _is_whole(until, written_at):
            assert time.monotonic() < ends_at
            assert started.poll() is None, started.communicate()
            time.sleep(0.01)
        written_at, dead = until.stat().st_mtime_ns, dead | alive
        os.kill(alive.pop(), signal.SIGKILL)
    out, err = started.communicate(timeout=PATIENCE_S)
    return Typed(started.returncode, out, err)


def _is_whole(path: Path, since: int) -> bool:
    """Tell whether a checkpoint was written after this, to its end."""
    return path.exists() and path.stat().st_mtime_ns > since and zipfile.is_zipfile(path)


def pids(folder: Path, script: str) -> list[int]:
    """Return the processes that run a script in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[1:2] == [script.encode()] and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def first_step(project: Project, attempt: int) -> int:
    """Return the iteration at which an attempt of nanoGPT began."""
    said = project.types("logs", "--task", "0", "--attempt", str(attempt)).out
    return int(re.findall(r"^step (\d+):", said, re.MULTILINE)[0])


def test_nanogpt_that_is_killed_resumes_by_its_own_flag_as_if_typed_by_hand(gpt: Project) -> None:
    configured(gpt, "--max_iters=120", effective_batch=8)
    done = killed(gpt, "train.py", output(gpt) / "ckpt.pt")
    assert done.code == 0, done.err
    assert causes(gpt) == ["crashed"]
    began = first_step(gpt, 2)
    assert 0 < began < 120, "the second attempt began where the first had saved"
    by_hand(gpt, HAND.format(8, 1, began))
    by_hand(gpt, f"{HAND.format(8, 1, 120)} --init_from=resume")
    assert equal(torch.load(output(gpt) / "ckpt.pt"), torch.load(gpt.folder / "hand/ckpt.pt"))


def test_nanogpt_that_is_cancelled_goes_on_after_resume_and_a_longer_one_starts_over(gpt: Project) -> None:
    configured(gpt, "--max_iters=1200", effective_batch=8)  # long enough that a cancel on a busy machine comes in time
    submitted = gpt.types("submit", "train", "--only", "--executor", "local")
    assert submitted.code == 0, submitted.err
    ends_at = time.monotonic() + PATIENCE_S
    while not zipfile.is_zipfile(output(gpt) / "ckpt.pt"):
        assert time.monotonic() < ends_at
    assert gpt.types("cancel", "--yes").code == 0
    assert gpt.types("status", "--json").json()["state"] == "stopped"
    assert gpt.types("resume", "--follow").code == 0
    assert 0 < first_step(gpt, 1) < 1200
    before = output(gpt)
    configured(gpt, "--max_iters=1210", effective_batch=8)
    assert output(gpt) != before, "as the page says: a changed command gets an empty folder"


def test_nanogpt_out_of_the_memory_of_its_device_gets_a_batch_that_fits(gpt: Project) -> None:
    configured(gpt, "--max_iters=10")
    plan = gpt.types("plan", "train", "--json").json()[0]
    assert (plan["micro_batch"], plan["accumulation"], plan["smaller"][:2]) == (64, 1, [32, 16])
    device_of_6_mb = small(gpt, 6_000_000)
    done = gpt.types(*SUBMIT, **device_of_6_mb)
    assert done.code == 0, done.err
    assert causes(gpt) == ["gpu_oom", "gpu_oom"]
    by_hand(gpt, HAND.format(16, 4, 10))
    assert equal(torch.load(output(gpt) / "ckpt.pt"), torch.load(gpt.folder / "hand/ckpt.pt"))


def test_the_batch_of_nanogpt_is_found_with_its_own_words_and_the_next_run_needs_no_retry(gpt: Project) -> None:
    configured(gpt, "--max_iters=10")
    device_of_6_mb = small(gpt, 6_000_000)
    script = "python train.py config/tiny.py --max_iters=1 --batch_size={micro_batch} --out_dir={output}"
    command = f"{script} --gradient_accumulation_steps={{accumulation}}".split()
    found = gpt.types("find-batch", "--max", "64", "--divides", "64", "--json", "--", *command, **device_of_6_mb)
    assert found.code == 0, found.err
    assert found.json()["micro_batch"] == 16
    assert not (gpt.folder / "out").exists(), "its tries wrote into temporary folders"
    done = gpt.types(*SUBMIT, "--set", "train.micro_batch=16", **device_of_6_mb)
    assert done.code == 0, done.err
    assert causes(gpt) == []


def test_nanogpt_in_too_little_host_memory_gets_more_and_ends_the_same(gpt: Project) -> None:
    configured(gpt, "--max_iters=10", effective_batch=8)
    done = gpt.types(*SUBMIT, "--set", "cluster.train.mem=150MiB")
    assert done.code == 0, done.err
    assert set(causes(gpt)) == {"host_oom"}
    by_hand(gpt, HAND.format(8, 1, 10))
    assert equal(torch.load(output(gpt) / "ckpt.pt"), torch.load(gpt.folder / "hand/ckpt.pt"))


def test_one_printed_line_tells_progress_by_which_nanogpt_survives_any_number_of_kills(gpt: Project) -> None:
    script = gpt.folder / "train.py"
    silent = script.read_text()
    assert silent.count(LOGS) == 1
    script.write_text(silent.replace(LOGS, STEP + LOGS))
    configured(gpt, "--max_iters=150", effective_batch=8)
    done = killed(gpt, "train.py", output(gpt) / "ckpt.pt", times=4)
    assert done.code == 0, done.err
    assert status(gpt)["census"]["figures"]["step"] == 150
    shutil.rmtree(output(gpt))
    script.write_text(silent)
    failed = killed(gpt, "train.py", output(gpt) / "ckpt.pt", times=3)
    assert failed.code == 7
    assert causes(gpt) == ["crashed"] * 3, "it saved and said nothing, so no attempt counts as progress"


def test_nanogpt_that_says_no_step_ends_at_its_time_limit_and_is_told_what_to_print(gpt: Project) -> None:
    configured(gpt, "--max_iters=1000000", effective_batch=8)
    failed = gpt.types(*SUBMIT, "--set", "cluster.train.time=5s")
    assert failed.code == 7
    assert causes(gpt) == ["timeout"] * 3
    assert 'pipeline: {"step"' in failed.err


def test_a_forgotten_option_is_named(gpt: Project) -> None:
    configured(gpt, "--max_iters=10", effective_batch=8)
    for typed in (("plan",), ("submit", "train", "--executor", "local", "--follow")):
        done = gpt.types(*typed)
        assert done.code != 0
        assert "pipeline submit train --only" in done.err


@pytest.mark.parametrize("model", ["LSTM", "Transformer --lr 1"])
def test_the_word_model_that_is_killed_starts_over_and_ends_as_without_a_break(words: Project, model: str) -> None:
    rest = f"{WORDS} --batch_size 8 --epochs 8 --model {model}"
    commanded(words, f"python {rest} --save {{output}}/model.pt")
    done = killed(words, "main.py", output(words) / "model.pt")
    assert done.code == 0, done.err
    assert causes(words) == ["crashed"]
    by_hand(words, f"{rest} --save hand.pt")
    assert weights(output(words) / "model.pt") == weights(words.folder / "hand.pt")


def test_the_word_model_cannot_accumulate_so_its_batch_is_found_before(words: Project) -> None:
    command = f"python {WORDS} --epochs 1 --batch_size {{micro_batch}} --save {{output}}/model.pt"
    commanded(words, command, effective_batch=32)
    device_of_12_mb = small(words, 12_000_000)
    assert words.types("plan", "train", "--json").json()[0]["smaller"] == []
    failed = words.types(*SUBMIT, **device_of_12_mb)
    assert failed.code == 7
    assert causes(words) == ["gpu_oom", "refused"]
    assert "pipeline find-batch" in failed.err
    found = words.types("find-batch", "--max", "32", "--json", "--", *command.split(), **device_of_12_mb)
    batch = found.json()["micro_batch"]
    assert 8 <= batch < 16, found.err
    done = words.types(*SUBMIT, "--set", f"train.effective_batch={batch}", **device_of_12_mb)
    assert done.code == 0, done.err
    assert causes(words) == []
    commanded(words, command, effective_batch=batch)
    by_hand(words, f"{WORDS} --epochs 1 --batch_size {batch} --save hand.pt")
    assert weights(output(words) / "model.pt") == weights(words.folder / "hand.pt")
