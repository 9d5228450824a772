"""A download ends with the file that was published, or with what to do; every interruption costs only what was cut."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.encoder.checkpoints.download import DownloadProgress, RetryPolicy, by_hand, fetch_file
from pipeline.errors import ConfigError, DataError, WeightsUnusable
from tests.encoder.checkpoints import file_server as web
from tests.encoder.checkpoints.file_server import File, Server

ROOT = Path(__file__).parents[3]
BODY = b"PK\x03\x04" + bytes(range(256)) * 4096  # a MiB and a little
HALF = len(BODY) // 2
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach this machine directly, whatever the environment says."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server of a file."""
    with ExitStack() as stack:
        yield lambda file=None, **how: stack.enter_context(Server(file or File(BODY), **how))


class Fetch:
    """Fetches to one place, without pausing, and keeps what was told."""

    def __init__(self, out: Path) -> None:
        self.out, self.told, self.pauses = out, list[DownloadProgress](), list[float]()

    def __call__(self, url: str, **how: Any) -> str:
        how = {"sha256": None, "patience": RetryPolicy(timeout_s=20), "pause": self.pauses.append, **how}
        return fetch_file(url, self.out, tell=self.told.append, **how)

    @property
    def partial(self) -> Path:
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.out.parent.iterdir()}


@pytest.fixture
def get(tmp_path: Path) -> Fetch:
    """Return a fetch to a folder that is not there yet."""
    return Fetch(tmp_path / "weights" / "model.pt")


def leave_half(server: Server, get: Fetch) -> None:
    """Fetch from a server that ends every connection half-way, until the fetch gives up."""
    server.file.odd.append(web.cut(HALF))
    with pytest.raises(DataError):
        get(server.url, patience=RetryPolicy(tries=1))
    assert get.partial.stat().st_size == HALF
    server.file.asked.clear()


def ranges(server: Server) -> list[str | None]:
    """Return which part each request asked for."""
    return [asked.range for asked in server.file.asked]


def test_a_file_arrives_whole_with_its_digest_and_nothing_beside_it(serve, get):
    server = serve()
    assert get(server.url, sha256=server.file.sha256) == hashlib.sha256(BODY).hexdigest()
    assert get.out.read_bytes() == BODY
    assert get.names == {"model.pt"}


def test_progress_tells_bytes_total_and_rate(serve, get):
    get(serve().url)
    assert [one.bytes for one in get.told] == sorted({one.bytes for one in get.told})
    assert get.told[-1].bytes == len(BODY)
    assert all(one.total == len(BODY) and one.rate > 0 for one in get.told)


def test_a_digest_in_capitals_is_the_same_digest(serve, get):
    server = serve()
    get(server.url, sha256=server.file.sha256.upper())


@pytest.mark.parametrize("interruption", [web.cut, web.reset])
def test_a_dropped_connection_is_taken_up_where_it_broke(serve, get, interruption):
    server = serve()
    server.file.odd.append(interruption(HALF))
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY
    assert len(server.file.asked) == 2
    assert len(get.pauses) == 1


def test_only_the_rest_is_asked_for_and_only_of_the_same_file(serve, get):
    server = serve()
    server.file.odd.append(web.cut(HALF))
    get(server.url)
    assert ranges(server) == [None, f"bytes={HALF}-"]
    assert [asked.headers.get("if-range") for asked in server.file.asked] == [None, '"one"']
    assert [asked.served for asked in server.file.asked] == [HALF, len(BODY) - HALF]


def test_a_later_command_goes_on_where_an_earlier_one_gave_up(serve, get):
    server = serve()
    leave_half(server, get)
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [f"bytes={HALF}-"]
    assert get.out.read_bytes() == BODY


def test_a_weak_tag_is_no_proof_but_a_date_is(serve, get):
    server = serve(File(BODY, etag='W/"one"', modified="Wed, 21 Oct 2015 07:28:00 GMT"))
    leave_half(server, get)
    get(server.url, sha256=server.file.sha256)
    assert server.file.asked[0].headers["if-range"] == "Wed, 21 Oct 2015 07:28:00 GMT"
    assert ranges(server) == [f"bytes={HALF}-"]


@pytest.mark.parametrize("tag", [None, 'W/"one"'])
def test_without_a_proof_that_it_is_the_same_file_everything_is_asked_for_again(serve, get, tag):
    server = serve(File(BODY, etag=tag))
    leave_half(server, get)
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [None]


def test_a_server_that_ignores_ranges_gives_the_file_from_its_beginning(serve, get):
    server = serve(File(BODY, ranges=False))
    leave_half(server, get)
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [f"bytes={HALF}-"]
    assert server.file.asked[0].served == len(BODY)
    assert get.out.read_bytes() == BODY


@pytest.mark.parametrize("heeds", [True, False])
def test_a_file_that_changed_between_two_attempts_is_not_glued_to_the_old_one(serve, get, heeds):
    server = serve()
    leave_half(server, get)
    server.file.body, server.file.etag, server.file.heeds_if_range = BODY[::-1], '"two"', heeds
    get(server.url)
    assert get.out.read_bytes() == BODY[::-1]


def test_a_file_of_another_length_is_not_glued_to_the_old_one(serve, get):
    server = serve()
    leave_half(server, get)
    server.file.body = BODY + b"more"
    get(server.url)
    assert get.out.read_bytes() == BODY + b"more"
    assert ranges(server) == [f"bytes={HALF}-", None]


def test_a_refused_range_begins_anew(serve, get):
    server = serve()
    leave_half(server, get)
    server.file.odd.append(web.status(416))
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [f"bytes={HALF}-", None]


def test_another_address_begins_anew(serve, get):
    one, other = serve(), serve(File(BODY[::-1]))
    leave_half(one, get)
    get(other.url)
    assert get.out.read_bytes() == BODY[::-1]
    assert ranges(other) == [None]


def test_a_note_that_cannot_be_read_begins_anew(serve, get):
    server = serve()
    leave_half(server, get)
    get.partial.with_name("model.pt.partial.json").write_text('{"url": ')
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [None]


def test_a_download_killed_after_its_last_byte_asks_for_nothing(serve, get):
    server = serve()
    leave_half(server, get)
    with get.partial.open("ab") as file:
        file.write(BODY[HALF:])
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY
    assert server.file.asked == []


CHILD = """
import sys; from pathlib import Path; from pipeline.encoder.checkpoints.download import fetch_file
fetch_file(sys.argv[1], Path(sys.argv[2]), sha256=None, tell=lambda progress: print(progress.bytes, flush=True))
"""


def start_child(server: Server, out: Path) -> subprocess.Popen[str]:
    """Start a download that hangs half-way, and return when it does."""
    server.file.odd.append(web.stall(HALF))
    words = [sys.executable, "-c", CHILD, server.url, str(out)]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while int(child.stdout.readline()) < HALF:
        pass
    return child


def test_a_download_killed_half_way_goes_on_and_asks_only_for_the_rest(serve, get):
    server = serve()
    with start_child(server, get.out) as child:
        child.send_signal(signal.SIGKILL)
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY
    assert [asked.served for asked in server.file.asked] == [HALF, len(BODY) - HALF]
    assert get.names == {"model.pt"}


def test_two_downloads_of_one_file_do_not_meet(serve, get):
    server = serve()
    with start_child(server, get.out) as child:
        with pytest.raises(ConfigError, match="another process is downloading it") as refusal:
            get(server.url)
        child.kill()
    assert "--out" in refusal.value.remedy
    assert get.partial.read_bytes() == BODY[:HALF]


def test_where_files_cannot_be_locked_each_download_has_a_file_of_its_own(serve, get, monkeypatch):
    def flock(*words: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    server = serve()
    monkeypatch.setattr(fcntl, "flock", flock)
    server.file.odd.append(web.cut(HALF))
    with pytest.raises(DataError):
        get(server.url, patience=RetryPolicy(tries=1))
    assert get.names <= {"model.pt.partial"}
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY


def test_a_wrong_digest_leaves_nothing_and_names_both(serve, get):
    with pytest.raises(WeightsUnusable) as refusal:
        get(serve().url, sha256="0" * 64)
    assert "0" * 64 in refusal.value.what
    assert hashlib.sha256(BODY).hexdigest() in refusal.value.what
    assert get.names == set()


def test_a_file_of_another_size_than_published_is_refused_before_it_comes(serve, get):
    server = serve()
    with pytest.raises(WeightsUnusable, match=f"{len(BODY):,} bytes, and should have 7"):
        get(server.url, size=7)
    assert get.told == []


def test_a_file_damaged_on_this_disk_between_two_attempts_is_found(serve, get):
    server = serve()
    leave_half(server, get)
    get.partial.write_bytes(b"\0" * HALF)
    with pytest.raises(WeightsUnusable):
        get(server.url, sha256=server.file.sha256)
    get(server.url, sha256=server.file.sha256)
    assert get.out.read_bytes() == BODY


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(serve, get, code):
    server = serve()
    server.file.odd += [web.status(code), web.status(code, Retry_After="0")]
    get(server.url, sha256=server.file.sha256)
    assert get.pauses == [1, 2]


def test_a_server_is_not_asked_sooner_than_it_wants(serve, get):
    server = serve()
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    server.file.odd += [web.status(429, Retry_After="7"), web.status(503, Retry_After=in_a_minute)]
    get(server.url)
    assert get.pauses[0] == 7
    assert 90 < get.pauses[1] <= 100


def test_a_server_that_wants_to_be_left_alone_is(serve, get):
    server = serve()
    server.file.odd.append(web.status(429, Retry_After="7200"))
    with pytest.raises(DataError, match=r"429 .* come back in 7,200 s"):
        get(server.url)
    assert len(server.file.asked) == 1


def test_pauses_grow_and_tries_that_bring_nothing_end(serve, get):
    server = serve()
    server.file.odd += [web.status(503)] * 9
    with pytest.raises(DataError, match=r"gave up: .* 503 ") as refusal:
        get(server.url, patience=RetryPolicy(tries=5, longest_pause_s=5))
    assert get.pauses == [1, 2, 4, 5]
    assert len(server.file.asked) == 5
    assert "--url" in refusal.value.remedy


def test_tries_that_bring_something_do_not_count(serve, get):
    server = serve()
    piece = len(BODY) // 12
    server.file.odd += [web.cut(piece)] * 11
    get(server.url, sha256=server.file.sha256, patience=RetryPolicy(tries=2))
    assert get.pauses == [1] * 11


def test_a_server_that_always_breaks_at_the_same_place_is_given_up(serve, get):
    server = serve(File(BODY, etag=None))
    server.file.odd += [web.cut(HALF)] * 20
    with pytest.raises(DataError, match=f"ended after {HALF:,} of {len(BODY):,} bytes"):
        get(server.url)
    assert len(server.file.asked) == 6


def test_less_than_came_before_is_no_progress(serve, get):
    server = serve(File(BODY, etag=None))
    server.file.odd += [web.cut(HALF), *map(web.cut, range(1, 20))]
    with pytest.raises(DataError):
        get(server.url)
    assert len(server.file.asked) == 6


def test_another_part_than_asked_for_is_not_glued_on(serve, get):
    server = serve()
    leave_half(server, get)
    server.file.odd.append(web.part(HALF - 1))
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [f"bytes={HALF}-", None]


def test_a_part_that_nobody_asked_for_is_refused(serve, get):
    server = serve()
    server.file.odd.append(web.part(5))
    with pytest.raises(DataError, match="the server answers 206"):
        get(server.url)


def test_more_than_was_announced_is_not_believed(serve, get):
    server = serve()
    leave_half(server, get)
    server.file.odd.append(web.part(HALF, more=b"more"))
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [f"bytes={HALF}-", None]


def test_a_partial_file_longer_than_the_file_begins_anew(serve, get):
    server = serve()
    leave_half(server, get)
    with get.partial.open("ab") as file:
        file.write(BODY)
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [None]


@pytest.mark.parametrize("body", [BODY[:HALF] + b"<!DOCTYPE html>" + BODY, b"<h\0\0\0\0\0\0" + BODY])
def test_bytes_that_look_like_a_page_only_at_a_glance_pass(serve, get, body):
    server = serve(File(body))
    leave_half(server, get)
    get(server.url, sha256=server.file.sha256)
    assert ranges(server) == [f"bytes={HALF}-"]


def test_a_file_that_another_process_publishes_meanwhile_is_not_written_to(serve, get, monkeypatch):
    other, flock = get.out.with_name("published.pt"), fcntl.flock

    def publish_first(file: Any, how: int) -> None:
        if not other.exists():
            get.partial.rename(other)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", publish_first)
    get(serve().url)
    assert other.read_bytes() == b""
    assert get.out.read_bytes() == BODY


def test_a_server_that_goes_away_is_no_missing_network(serve, get):
    server = serve()
    server.file.odd.append(web.cut(HALF))
    with pytest.raises(DataError, match=f"Connection refused; {HALF:,} bytes are kept") as refusal:
        get(server.url, pause=lambda seconds: server.__exit__())
    assert "the same command later" in refusal.value.remedy


def test_a_network_that_swallows_everything_says_what_to_do(serve, get):
    server = serve()
    server.file.odd += [web.hang_up] * 9
    with pytest.raises(DataError, match="gave up") as refusal:
        get(server.url)
    assert "pipeline weights import" in refusal.value.remedy


def test_a_server_that_hangs_up_without_a_word_is_asked_again(serve, get):
    server = serve()
    server.file.odd.append(web.hang_up)
    get(server.url, sha256=server.file.sha256)
    assert len(server.file.asked) == 2


def test_a_silent_server_is_left_after_the_timeout_and_what_came_is_kept(serve, get):
    server = serve()
    server.file.odd.append(web.stall(HALF))
    get(server.url, sha256=server.file.sha256, patience=RetryPolicy(timeout_s=0.2))
    assert ranges(server) == [None, f"bytes={HALF}-"]


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_a_refusal_is_final_and_says_where_else_to_look(serve, get, code):
    server = serve()
    server.file.odd.append(web.status(code))
    with pytest.raises(DataError, match=f"the server answers {code}") as refusal:
        get(server.url)
    assert refusal.value.where == server.url
    assert "--url" in refusal.value.remedy
    assert get.pauses == []


def test_an_empty_file_is_refused(serve, get):
    with pytest.raises(DataError, match="empty file"):
        get(serve(File(b"")).url)
    assert not get.out.exists()


def test_a_file_of_unknown_length_arrives(serve, get):
    server = serve(File(BODY, tells_length=False))
    get(server.url, sha256=server.file.sha256)
    assert get.told[-1].total is None


@pytest.mark.parametrize(
    "answer",
    [
        web.page(),
        web.page(body=b"Please log in"),
        web.page("application/octet-stream"),
        web.page("application/octet-stream", code=203),
        web.page(code=511),
    ],
)
def test_a_web_page_in_place_of_the_file_is_refused_and_costs_nothing(serve, get, answer):
    server = serve()
    leave_half(server, get)
    server.file.odd.append(answer)
    with pytest.raises(DataError, match=r"web page|login|answers 203") as refusal:
        get(server.url)
    assert "pipeline weights" in refusal.value.remedy
    assert get.partial.stat().st_size == HALF
    get(server.url, sha256=server.file.sha256)
    assert ranges(server)[-1] == f"bytes={HALF}-"


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_keep_the_range(serve, get, code):
    behind = serve()
    front = serve(File(b""))
    front.file.odd += [web.redirect(behind.url, code)] * 2
    behind.file.odd.append(web.cut(HALF))
    get(front.url, sha256=behind.file.sha256)
    assert ranges(behind) == [None, f"bytes={HALF}-"]


def test_redirects_in_a_circle_end(serve, get):
    server = serve()
    server.file.odd += [web.redirect(server.url)] * 20
    with pytest.raises(DataError, match="302"):
        get(server.url)


def test_a_redirect_to_another_kind_of_address_is_refused(serve, get):
    server = serve()
    server.file.odd.append(web.redirect("ftp://localhost/x"))
    with pytest.raises(DataError, match="redirects to ftp"):
        get(server.url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
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
    with pytest.raises(DataError, match="not HTTPS"):
        get(secure.url)
    assert plain.file.asked == []
    get(secure.url, sha256=secure.file.sha256)
    plain.file.odd.append(web.redirect(secure.url))
    get(plain.url, sha256=secure.file.sha256)


def test_a_certificate_that_nobody_trusts_is_refused_with_the_way_to_trust_it(serve, get, certificate):
    with pytest.raises(DataError, match="certificate is not trusted") as refusal:
        get(serve(certificate=certificate).url)
    assert "SSL_CERT_FILE" in refusal.value.remedy
    assert get.pauses == []


def closed_port() -> int:
    """Return a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def assert_says_what_to_do(refusal: DataError, url: str, out: Path) -> None:
    assert refusal.exit_code == 3
    assert url in refusal.where
    assert f"curl --fail --location --continue-at - --output m.pt {url}" in refusal.remedy
    assert f"wget --continue --output-document=m.pt {url}" in refusal.remedy
    assert f"pipeline weights import m.pt --out {out}" in refusal.remedy


def test_without_a_network_it_says_at_once_what_to_do(get):
    url = f"http://127.0.0.1:{closed_port()}/m.pt"
    with pytest.raises(DataError, match="cannot be reached from this machine: Connection refused") as refusal:
        get(url)
    assert_says_what_to_do(refusal.value, url, get.out)
    assert get.pauses == []


def test_a_name_that_nobody_knows_says_what_to_do(get):
    url = "http://no-such-host.invalid/m.pt"  # .invalid never resolves (RFC 2606)
    with pytest.raises(DataError, match="cannot be reached from this machine") as refusal:
        get(url)
    assert_says_what_to_do(refusal.value, url, get.out)


def test_a_dead_proxy_is_named_without_its_password(get, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{closed_port()}")
    url = "http://example.org/m.pt"
    with pytest.raises(DataError, match=r"through the proxy 127\.0\.0\.1: Connection refused") as refusal:
        get(url)
    assert "secret" not in str(refusal.value)
    assert_says_what_to_do(refusal.value, url, get.out)


def test_a_proxy_of_the_environment_is_used(serve, get, monkeypatch):
    proxy = serve()
    monkeypatch.setenv("http_proxy", f"http://localhost:{proxy.server_port}")
    get("http://no-such-host.invalid/m.pt", sha256=proxy.file.sha256)
    assert proxy.file.asked[0].path == "http://no-such-host.invalid/m.pt"


def test_a_proxy_that_refuses_to_connect_says_what_to_do(serve, get, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://localhost:{serve().server_port}")  # which knows no CONNECT
    with pytest.raises(DataError, match=r"through the proxy localhost: .*501") as refusal:
        get("https://no-such-host.invalid/m.pt")
    assert "pipeline weights import" in refusal.value.remedy


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:///etc/passwd",
        "ftp://host/x.pt",
        "https://",
        "esm2.pt",
        "http://host/a b",
        "http://host:x/",
        "http://h/\n",
    ],
)
def test_what_is_no_address_of_a_file_is_refused_before_anything_is_made(get, url):
    with pytest.raises(ConfigError, match="not the address"):
        get(url)
    assert not get.out.parent.exists()


def test_a_disk_that_is_too_small_is_refused_before_it_is_filled(serve, get, monkeypatch):
    server = serve()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, len(BODY) - 1))
    with pytest.raises(ConfigError, match=f"{len(BODY) - 1:,} bytes free, and {len(BODY):,} are to come"):
        get(server.url)
    assert get.told == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, len(BODY)))
    get(server.url, sha256=server.file.sha256)


def test_only_what_is_still_to_come_must_fit(serve, get, monkeypatch):
    server = serve()
    leave_half(server, get)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, len(BODY) - HALF))
    get(server.url, sha256=server.file.sha256)


def test_a_disk_that_fills_up_says_so_and_keeps_what_came(serve, get):
    code = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from pathlib import Path; from pipeline.encoder.checkpoints.download import fetch_file
from pipeline.errors import ConfigError
try: fetch_file(sys.argv[1], Path(sys.argv[2]), sha256=None, tell=lambda progress: None)
except ConfigError as error: print(error)
"""
    server = serve()
    words = [sys.executable, "-c", code, server.url, str(get.out), str(HALF)]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "cannot write model.pt there: File too large" in said
    assert "goes on from here" in said
    assert 0 < get.partial.stat().st_size <= HALF
    get(server.url, sha256=server.file.sha256)
    assert ranges(server)[-1] is not None


def test_a_folder_that_may_not_be_written_is_named(serve, unprivileged):
    folder = unprivileged / "mine"
    folder.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="Permission denied") as refusal:
        Fetch(folder / "model.pt")(serve().url)
    assert refusal.value.where == str(folder)
    assert "--out" in refusal.value.remedy


def test_a_folder_in_the_place_of_the_file_is_refused_before_anything_comes(serve, get):
    get.out.mkdir(parents=True)
    server = serve()
    with pytest.raises(ConfigError, match="a folder has that name"):
        get(server.url)
    assert server.file.asked == []


def test_what_is_said_for_hand_work_can_be_pasted():
    said = by_hand("https://host/a%20b/m%20x.pt?download=true", Path("my weights/m.pt"))
    assert "--output 'm x.pt' 'https://host/a%20b/m%20x.pt?download=true'" in said
    assert "import 'm x.pt' --out 'my weights/m.pt'" in said


def test_many_downloads_in_one_process_leave_no_thread_behind(serve, get):
    before = threading.active_count()
    with Server(File(BODY)) as server:
        get(server.url)
    assert threading.active_count() <= before + 1
