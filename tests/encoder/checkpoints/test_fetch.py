"""A download ends with the file that was published, or with what to do; an interruption costs only what was cut."""

from __future__ import annotations

import hashlib
import shutil
import signal
import socket
import subprocess
import sys
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.encoder.download import DownloadProgress, RetryPolicy, by_hand, fetch_file
from pipeline.errors import ConfigError, DataError, WeightsUnusable
from tests.encoder.checkpoints import file_server as web
from tests.encoder.checkpoints.file_server import File, Server

ROOT = Path(__file__).parents[3]
BODY = b"PK\x03\x04" + bytes(range(256)) * 4096  # a MiB and a little
HALF = len(BODY) // 2
REST = [HALF, len(BODY) - HALF]  # bytes of each request where the second asks only for what is missing
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """Reach this machine directly, whatever the environment says."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def serve():
    """Return a function that starts a server of a file."""
    with ExitStack() as stack:
        yield lambda file=None, **how: stack.enter_context(Server(file or File(BODY), **how))


class Fetch:
    """Fetches to one place, without pausing, and keeps what it reports."""

    def __init__(self, out: Path) -> None:
        self.out, self.progress, self.pauses = out, list[DownloadProgress](), list[float]()

    def __call__(self, url: str, **how: Any) -> str:
        how = {"sha256": None, "patience": RetryPolicy(timeout_s=20), "pause": self.pauses.append, **how}
        return fetch_file(url, self.out, tell=self.progress.append, **how)

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.out.parent.iterdir()}


@pytest.fixture
def get(tmp_path):
    """Return a fetch to a folder that is not there yet."""
    return Fetch(tmp_path / "weights" / "model.pt")


def leave_half(server: Server, get: Fetch) -> None:
    """Fetch from a server that ends every connection half-way, until the fetch gives up."""
    server.file.odd.append(web.cut(HALF))
    with pytest.raises(DataError):
        get(server.url, patience=RetryPolicy(tries=1))


def served(server: Server) -> list[int]:
    """Return how many bytes each request was given."""
    return [asked.served for asked in server.file.asked]


def test_a_file_arrives_whole_with_its_digest_and_nothing_beside_it(serve, get):
    server = serve()
    assert get(server.url, sha256=server.file.sha256.upper()) == hashlib.sha256(BODY).hexdigest()
    assert get.out.read_bytes() == BODY
    assert get.names == {"model.pt"}
    assert [one.bytes for one in get.progress] == sorted({one.bytes for one in get.progress})
    assert get.progress[-1].bytes == len(BODY)
    assert all(one.total == len(BODY) and one.rate > 0 for one in get.progress)


@pytest.mark.parametrize("interruption", [web.cut, web.reset])
def test_a_dropped_connection_is_resumed_where_it_broke(serve, get, interruption):
    server = serve()
    server.file.odd.append(interruption(HALF))
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY
    assert len(server.file.asked) == 2


def test_a_later_command_continues_where_an_earlier_one_gave_up(serve, get):
    server = serve()
    leave_half(server, get)
    get(server.url, sha256=server.file.sha256)
    assert served(server) == REST
    assert get.out.read_bytes() == BODY


@pytest.mark.parametrize(
    "change",
    [
        {"body": BODY[::-1], "etag": '"two"'},
        {"body": BODY[::-1], "etag": '"two"', "heeds_if_range": False},
        {"body": BODY + b"more"},
        {"body": BODY[::-1], "etag": None},
        {"ranges": False},
    ],
)
def test_parts_of_two_files_are_never_glued_together(serve, get, change):
    server = serve()
    leave_half(server, get)
    for name, value in change.items():
        setattr(server.file, name, value)
    get(server.url)
    assert get.out.read_bytes() == server.file.body


CHILD = """
import sys; from pathlib import Path; from pipeline.encoder.download import fetch_file
fetch_file(sys.argv[1], Path(sys.argv[2]), sha256=None, tell=lambda progress: print(progress.bytes, flush=True))
"""


def test_a_process_killed_half_way_costs_nothing_and_another_does_not_meet_it(serve, get):
    server = serve()
    server.file.odd.append(web.stall(HALF))
    words = [sys.executable, "-c", CHILD, server.url, str(get.out)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        while int(child.stdout.readline()) < HALF:
            pass
        with pytest.raises(ConfigError) as refusal:
            get(server.url)
        assert "--out" in refusal.value.remedy
        child.send_signal(signal.SIGKILL)
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY
    assert served(server) == REST
    assert get.names == {"model.pt"}


def test_a_wrong_digest_leaves_nothing_and_names_both(serve, get):
    with pytest.raises(WeightsUnusable) as refusal:
        get(serve().url, sha256="0" * 64)
    assert all(digest in refusal.value.what for digest in ("0" * 64, hashlib.sha256(BODY).hexdigest()))
    assert get.names == set()


def test_a_file_of_another_size_than_published_is_refused_before_it_comes(serve, get):
    with pytest.raises(WeightsUnusable):
        get(serve().url, size=7)
    assert get.progress == []


def test_a_part_damaged_on_this_disk_between_two_attempts_is_found(serve, get):
    server = serve()
    leave_half(server, get)
    (partial,) = (path for path in get.out.parent.iterdir() if path.stat().st_size == HALF)
    partial.write_bytes(b"\0" * HALF)
    with pytest.raises(WeightsUnusable):
        get(server.url, sha256=server.file.sha256)
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY


def test_a_busy_server_is_asked_again_and_not_sooner_than_it_wants(serve, get):
    server = serve()
    server.file.odd += [web.status(503), web.status(429, Retry_After="7"), web.hang_up]
    get(server.url, sha256=server.file.sha256)
    assert len(server.file.asked) == 4
    assert get.pauses[1] == 7


def test_tries_that_bring_nothing_end_and_those_that_bring_something_do_not_count(serve, get):
    server = serve()
    server.file.odd += [web.cut(len(BODY) // 12)] * 11
    get(server.url, sha256=server.file.sha256, patience=RetryPolicy(tries=2))
    get.out.unlink()
    get.pauses.clear()
    server.file.odd += [web.status(503)] * 9
    with pytest.raises(DataError) as refusal:
        get(server.url, patience=RetryPolicy(tries=5, longest_pause_s=5))
    assert get.pauses == [1, 2, 4, 5]
    assert "--url" in refusal.value.remedy


@pytest.mark.parametrize("answers", [[web.status(401)], [web.status(404)], []])
def test_a_refusal_is_final_and_says_where_else_to_look(serve, get, answers):
    server = serve(File(b""))  # where it does not refuse, the file is empty
    server.file.odd += answers
    with pytest.raises(DataError) as refusal:
        get(server.url)
    assert not get.out.exists()
    assert refusal.value.where == server.url
    assert "--url" in refusal.value.remedy
    assert get.pauses == []


@pytest.mark.parametrize("answer", [web.page(), web.page("application/octet-stream"), web.page(code=511)])
def test_a_web_page_in_place_of_the_file_is_refused_and_costs_nothing(serve, get, answer):
    server = serve()
    leave_half(server, get)
    server.file.odd.append(answer)
    with pytest.raises(DataError) as refusal:
        get(server.url)
    assert "pipeline weights" in refusal.value.remedy
    get(server.url, sha256=server.file.sha256)
    assert served(server)[-1] == REST[1]


def test_redirects_are_followed_until_they_go_in_a_circle_or_elsewhere(serve, get):
    behind, front = serve(), serve(File(b""))
    front.file.odd += [web.redirect(behind.url), web.redirect(behind.url, 308)]
    behind.file.odd.append(web.cut(HALF))
    get(front.url, sha256=behind.file.sha256)
    assert served(behind) == REST
    for target in (front.url, "ftp://localhost/x"):
        front.file.odd.clear()
        front.file.odd += [web.redirect(target)] * 20
        with pytest.raises(DataError):
            get(front.url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return a self-signed certificate of localhost with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*words.split(), "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return str(path)


def test_https_works_and_is_not_left_by_a_redirect(serve, get, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    secure, plain = serve(certificate=certificate), serve()
    secure.file.odd.append(web.redirect(plain.url))
    with pytest.raises(DataError):
        get(secure.url)
    assert plain.file.asked == []
    get(secure.url, sha256=secure.file.sha256)
    plain.file.odd.append(web.redirect(secure.url))
    get(plain.url, sha256=secure.file.sha256)


def test_a_certificate_without_trust_is_refused_with_the_way_to_trust_it(serve, get, certificate):
    with pytest.raises(DataError) as refusal:
        get(serve(certificate=certificate).url)
    assert "SSL_CERT_FILE" in refusal.value.remedy


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("proxied", [False, True])
def test_without_a_network_it_says_at_once_what_to_do(get, monkeypatch, proxied):
    url = "http://no-such-host.invalid/m.pt"  # .invalid never resolves (RFC 2606)
    if proxied:
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{closed_port()}")
    with pytest.raises(DataError) as refusal:
        get(url)
    assert refusal.value.exit_code == 3
    assert url in refusal.value.where
    assert all(word in refusal.value.remedy for word in ("curl ", "wget ", f"weights import m.pt --out {get.out}"))
    assert "secret" not in str(refusal.value)
    assert get.pauses == []


def test_a_proxy_of_the_environment_is_used(serve, get, monkeypatch):
    proxy = serve()
    monkeypatch.setenv("http_proxy", f"http://localhost:{proxy.server_port}")
    get("http://no-such-host.invalid/m.pt", sha256=proxy.file.sha256)
    assert proxy.file.asked[0].path == "http://no-such-host.invalid/m.pt"
    monkeypatch.setenv("https_proxy", f"http://localhost:{proxy.server_port}")  # which knows no CONNECT
    with pytest.raises(DataError) as refusal:
        get("https://no-such-host.invalid/m.pt")
    assert "weights import" in refusal.value.remedy


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://h/x.pt", "https://", "http://h/a b", "http://h:x/"])
def test_what_is_no_address_of_a_file_is_refused_before_anything_is_made(get, url):
    with pytest.raises(ConfigError):
        get(url)
    assert not get.out.parent.exists()


def test_a_disk_that_is_too_small_for_what_is_to_come_is_refused_before_it_is_filled(serve, get, monkeypatch):
    server = serve()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, len(BODY) - HALF))
    with pytest.raises(ConfigError):
        get(server.url)
    assert get.progress == []
    monkeypatch.undo()
    leave_half(server, get)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, len(BODY) - HALF))
    get(server.url, sha256=server.file.sha256)


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from pathlib import Path; from pipeline.encoder.download import fetch_file
from pipeline.errors import ConfigError
try: fetch_file(sys.argv[1], Path(sys.argv[2]), sha256=None, tell=lambda progress: None)
except ConfigError as error: print(error)
"""


def test_a_disk_that_fills_up_says_so_and_keeps_what_came(serve, get):
    server = serve()
    words = [sys.executable, "-c", FULL, server.url, str(get.out), str(HALF)]
    assert "model.pt" in subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    get(server.url, sha256=server.file.sha256)
    assert 0 < served(server)[-1] < len(BODY)


def test_a_place_that_cannot_take_the_file_is_refused_by_name_before_anything_comes(serve, get, unprivileged):
    server, closed = serve(), unprivileged / "mine"
    closed.mkdir(mode=0o500)
    with pytest.raises(ConfigError) as refusal:
        Fetch(closed / "model.pt")(server.url)
    assert refusal.value.where == str(closed)
    assert "--out" in refusal.value.remedy
    taken = Fetch(unprivileged / "model.pt")
    taken.out.mkdir()
    with pytest.raises(ConfigError):
        taken(server.url)
    assert server.file.asked == []


def test_what_is_said_for_hand_work_can_be_pasted():
    said = by_hand("https://host/a%20b/m%20x.pt?download=true", Path("my weights/m.pt"))
    assert "--output 'm x.pt' 'https://host/a%20b/m%20x.pt?download=true'" in said
    assert "import 'm x.pt' --out 'my weights/m.pt'" in said
