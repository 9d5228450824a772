"""Downloads one large file: resumes after every kind of interruption, and never takes a part for the whole."""

from __future__ import annotations

import http.client
import re
import ssl
import time
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from pipeline import __version__
from pipeline.command_line import quoted
from pipeline.encoder.partial_download import (
    BLOCK_BYTES,
    DownloadOrigin,
    Partial,
    claim_partial,
    refuse_small_disk,
)
from pipeline.errors import ConfigError, DataError, WeightsUnusable

if TYPE_CHECKING:
    from collections.abc import Callable
    from email.message import Message
    from http.client import HTTPMessage, HTTPResponse
    from pathlib import Path
    from urllib.request import Request

WHOLE, PART, BEYOND_THE_END = 200, 206, 416
TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}  # what passes with time
LOGIN_WANTED = {407, 511}  # by a proxy, by a network
SCHEMES = ("https", "http")
PAGES = ("text/html", "application/xhtml+xml")
ANOTHER_PLACE = "use another source: pipeline weights fetch NAME --url URL"
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<[!?a-zA-Z]")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """The progress of a download."""

    bytes: int
    total: int | None  # None: the server does not say
    rate: float  # bytes a second since this process began


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long to retry."""

    tries: int = 6  # in a row that bring nothing new
    timeout_s: float = 30.0  # for a connection, and for the next byte
    first_pause_s: float = 1.0  # which doubles with every try
    longest_pause_s: float = 60.0
    longest_asked_s: float = 300.0  # a server that asks for more is left alone

    def pause_s(self, failures: int, asked_s: float) -> float:
        """Return how long to wait after so many failures in a row; never less than the server asks."""
        return max(min(self.first_pause_s * 2.0 ** (failures - 1), self.longest_pause_s), asked_s)


PATIENT = RetryPolicy()


def fetch_file(
    url: str,
    out: Path,
    *,
    sha256: str | None,
    size: int | None = None,
    accept: Callable[[Path], object] = bool,
    tell: Callable[[DownloadProgress], None],
    patience: RetryPolicy = PATIENT,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Download `url` to `out`, resuming an earlier attempt; return the file's SHA-256.

    `accept` is called with the finished file before it gets its name, and may raise WeightsUnusable.
    """
    _refuse_odd_url(url)
    with claim_partial(out) as partial:
        _Download(url, out, partial, size, tell).run(patience, pause)
        digest = partial.sha256()
        try:
            if sha256 is not None and digest != sha256.lower():
                what = f"checksum mismatch: expected SHA-256 {sha256}, got {digest}"
                raise WeightsUnusable(what)
            accept(partial.path)
        except WeightsUnusable as refusal:
            partial.discard()
            remedy = f"try again, or {ANOTHER_PLACE}"
            raise WeightsUnusable(f"the download: {refusal.what}", where=url, remedy=remedy) from refusal
        partial.publish()
    return digest


def by_hand(url: str, out: Path) -> str:
    """Return instructions for bringing a file to a machine that cannot download it."""
    name = PurePosixPath(unquote(urlsplit(url).path)).name or out.name
    lines = (
        "where there is internet access (a login node, your computer), run one of",
        f"    curl --fail --location --continue-at - --output {quoted(name)} {quoted(url)}",
        f"    wget --continue --output-document={quoted(name)} {quoted(url)}",
        "  then copy the file to a folder that this machine sees (scp, rsync), and run here",
        f"    pipeline weights import {quoted(name)} --out {quoted(out)}",
        "  behind a proxy: export https_proxy=http://HOST:PORT, then run the same command again",
    )
    return "\n".join(lines)


class _Interrupted(Exception):
    """A try that ended early, after which another is worthwhile."""

    def __init__(self, why: str, asked_s: float = 0.0) -> None:
        super().__init__(why)
        self.asked_s = asked_s  # by the server


class _Download:
    """Requests what is missing until the file is complete."""

    def __init__(
        self, url: str, out: Path, partial: Partial, size: int | None, tell: Callable[[DownloadProgress], None]
    ) -> None:
        self._url, self._out, self._partial, self._size, self._tell = url, out, partial, size, tell
        self._opener = urllib.request.build_opener(_Redirects)
        self._began, self._came = time.monotonic(), 0
        self._answered = self._ended = False

    def run(self, patience: RetryPolicy, pause: Callable[[float], None]) -> None:
        """Try until the file is complete; give up after too many tries in a row without a new byte."""
        furthest, failures = self._partial.size, 0
        while not self._ended and not self._partial.is_whole(self._url):
            try:
                self._try(patience.timeout_s)
            except _Interrupted as interruption:
                failures = 1 if self._partial.size > furthest else failures + 1
                furthest = max(furthest, self._partial.size)
                if failures >= patience.tries or interruption.asked_s > patience.longest_asked_s:
                    raise self._gave_up(interruption) from interruption
                pause(patience.pause_s(failures, interruption.asked_s))

    def _try(self, timeout_s: float) -> None:
        """Request once what is missing, and receive the response."""
        try:
            response = self._opener.open(self._request(), timeout=timeout_s)
        except HTTPError as answer:
            self._answered = True
            with answer:
                self._handle_error(answer)
            return
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, URLError) and not self._answered:
                raise self._unreachable(error) from error
            raise _Interrupted(_reason(error)) from error
        self._answered = True
        with response:
            self._receive(response)

    def _request(self) -> Request:
        """Return a request for the whole file, or for the rest of the very file whose beginning is here."""
        headers = {"User-Agent": f"pipeline/{__version__}", "Accept-Encoding": "identity"}
        if self._partial.can_go_on(self._url):
            assert self._partial.origin is not None
            self._partial.catch_up()
            headers |= {"Range": f"bytes={self._partial.size}-", "If-Range": self._partial.origin.validator}
        elif self._partial.size:
            self._partial.restart()
        return urllib.request.Request(self._url, headers=headers)  # noqa: S310 - `fetch` has looked at the scheme

    def _handle_error(self, answer: HTTPError) -> None:
        """Handle an HTTP error: restart, try again later, or raise."""
        if answer.code == BEYOND_THE_END and self._partial.size:
            self._partial.restart()
            return
        problem = f"the server answered {answer.code} {answer.reason}"
        if answer.code in TRY_AGAIN:
            raise _Interrupted(problem, _retry_after_s(answer.headers))
        if answer.code in LOGIN_WANTED:
            raise DataError(f"the proxy or server requires a login: {problem}", where=self._url, remedy=self._by_hand)
        raise DataError(problem, where=self._url, remedy=ANOTHER_PLACE)

    def _receive(self, response: HTTPResponse) -> None:
        """Write the body of a response to its place in the partial file."""
        start, total = self._span(response)
        block = _next_block(response)
        self._refuse_page(response, block if start == 0 else b"")
        self._refuse_other_size(total)
        if start == 0:
            self._partial.restart(DownloadOrigin.of(self._url, response.headers, total))
        elif not self._continues(response, start, total):
            self._partial.restart()
            return
        refuse_small_disk(self._out.parent, (total or 0) - self._partial.size)
        while block:
            self._take(block, total)
            block = _next_block(response)
        self._end(total)

    def _span(self, response: HTTPResponse) -> tuple[int, int | None]:
        """Return the offset at which a response begins, and the file's length if the server states it."""
        if response.status == WHOLE:
            length = response.headers.get("Content-Length", "")
            return 0, int(length) if length.isdigit() else None
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if response.status != PART or match is None or (int(match[1]) and not self._partial.size):
            what = f"the server answered {response.status} {response.reason} instead of a file"
            raise DataError(what, where=self._url, remedy=ANOTHER_PLACE)
        return int(match[1]), None if match[3] == "*" else int(match[3])

    def _continues(self, response: HTTPResponse, start: int, total: int | None) -> bool:
        """Say whether a response continues the bytes here: some servers ignore If-Range."""
        origin = self._partial.origin
        return origin is not None and start == self._partial.size and origin.agrees(response.headers, total)

    def _take(self, block: bytes, total: int | None) -> None:
        """Append a block, and report progress."""
        if total is not None and self._partial.size + len(block) > total:
            self._partial.restart()
            raise _Interrupted(f"the server sent more than the announced {total:,} bytes that were announced")
        self._partial.append(block)
        self._came += len(block)
        passed_s = max(time.monotonic() - self._began, 1e-6)
        self._tell(DownloadProgress(self._partial.size, total, self._came / passed_s))

    def _end(self, total: int | None) -> None:
        """Check that the end of a response is the end of the file."""
        if total is not None and self._partial.size < total:
            raise _Interrupted(f"the connection ended after {self._partial.size:,} of {total:,} bytes")
        if not self._partial.size:
            raise DataError("the server sent an empty file", where=self._url, remedy=ANOTHER_PLACE)
        self._ended = True

    def _refuse_page(self, response: HTTPResponse, beginning: bytes) -> None:
        """Refuse a web page before it overwrites what was downloaded earlier."""
        is_page = _PAGE.match(beginning) is not None and b"\0" not in beginning[:64]
        if is_page or response.headers.get_content_type() in PAGES:
            what = "received a web page instead of the file: the network requires a login, or the address is a page"
            raise DataError(what, where=response.geturl(), remedy=self._by_hand)

    def _refuse_other_size(self, total: int | None) -> None:
        """Refuse a file of another size than the published one, before it is downloaded."""
        if None not in (total, self._size) and total != self._size:
            what = f"size mismatch: got {total:,} bytes, expected {self._size:,}"
            raise WeightsUnusable(what, where=self._url, remedy=ANOTHER_PLACE)

    def _unreachable(self, error: URLError) -> DataError:
        """Return the error for a failed connection, with what to do without one."""
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            what = f"its certificate is not trusted: {error.reason.verify_message}"
            remedy = f"if your site has its own certificates: export SSL_CERT_FILE=FILE; else, {self._by_hand}"
            return DataError(what, where=self._url, remedy=remedy)
        what = f"cannot be reached from this machine{_through_proxy(self._url)}: {_reason(error)}"
        return DataError(what, where=self._url, remedy=self._by_hand)

    def _gave_up(self, interruption: _Interrupted) -> DataError:
        """Return the error after the last try, with how much is kept."""
        what, remedy = f"gave up: {interruption}", f"run the same command later; or {ANOTHER_PLACE}"
        if interruption.asked_s:
            what += f" and asks to retry in {interruption.asked_s:,.0f} s"
        if self._partial.can_go_on(self._url):
            what += f"; {self._partial.size:,} bytes are kept; the same command continues from there"
        return DataError(what, where=self._url, remedy=remedy if self._answered else self._by_hand)

    @property
    def _by_hand(self) -> str:
        return by_hand(self._url, self._out)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never out of HTTPS."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Return the request for the new address."""
        if urlsplit(newurl).scheme not in SCHEMES[: 1 if urlsplit(req.full_url).scheme == "https" else None]:
            fp.close()
            what = f"redirects to {newurl}, which is not HTTPS"
            raise DataError(what, where=req.full_url, remedy=ANOTHER_PLACE)
        return super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)


def _refuse_odd_url(url: str) -> None:
    """Refuse anything but the HTTP(S) address of a file."""
    try:
        parts = urlsplit(url)
        is_odd = parts.scheme not in SCHEMES or not parts.hostname or (parts.port or 1) < 1
    except ValueError:
        is_odd = True
    if is_odd or not url.isascii() or re.search(r"[\s\x00-\x20\x7f]", url):
        what = "not the address of a file on a web server"
        raise ConfigError(what, where=url, remedy="--url https://HOST/PATH/NAME.pt")


def _next_block(response: HTTPResponse) -> bytes:
    """Return the next bytes of a response; empty at the end."""
    try:
        return response.read1(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the message of a network error, without the names of Python's classes."""
    cause = error.reason if isinstance(error, URLError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__


def _retry_after_s(headers: Message) -> float:
    """Return how long a server asks to wait: Retry-After holds seconds, or a date."""
    value = headers.get("Retry-After", "0").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _through_proxy(url: str) -> str:
    """Name the proxy in use, without the password that its address may hold; empty where there is none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return f" through the proxy {urlsplit(proxy).hostname or 'of the environment'}"
