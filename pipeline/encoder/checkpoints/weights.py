"""Which checkpoint a run uses: found where it lies, identified by its content, and read only once.

Nothing here imports torch before a checkpoint must be read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.encoder.checkpoints.checkpoint_files import (
    CONFIG,
    INDEX,
    MAIN_MODEL,
    SINGLE,
    CheckpointFiles,
    files_of,
    unreadable_checkpoint,
)
from pipeline.errors import CacheDamaged, ConfigError, RecordMissing, WeightsUnusable
from pipeline.keys import is_settled, recipe_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.store.store import Store

log = logging.getLogger(__name__)

WEIGHTS_VERSION = 1  # raise it when digests of the same weights change
_BLOCK_BYTES = 1 << 20
_SUFFIXES = (".pt", ".safetensors")


class PublishedMatch(str, Enum):
    """What the table of published models says of a file that it does not contradict."""

    EQUAL = "equal"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint that was read and found in order."""

    name: str
    form: str
    path: str
    digest: str
    layers: int
    dim: int
    heads: int
    precision: str  # fp32, fp16 or bf16, as stored
    bytes: int  # of its files

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckpointFacts:
        """Read what `to_json` wrote."""
        return cls(**data)


def find_checkpoint(path: Path) -> Path:
    """Return the path, or where else the same checkpoint lies: on a node without internet, what is there must do."""
    looked = list(dict.fromkeys(_places(path)))
    for place in looked:
        if _is_there(place) if place == path else _is_checkpoint(place):
            return place
    model = published(stem(path))
    lines = "\n".join(f"    {place}" for place in looked)
    what = f"embed.weights: there is no checkpoint at this path, nor anywhere else that was looked at:\n{lines}"
    fetch = (
        f"pipeline weights fetch {model.name if model else MAIN_MODEL}   (or set embed.weights to one that you have)"
    )
    raise ConfigError(what, where=str(path), remedy=fetch)


def identify(path: Path, seen: Store, *, remember: bool = True) -> CheckpointFacts:
    """Return what a checkpoint is; it is read again only if one of its files changed since it was remembered."""
    place = find_checkpoint(path)
    files = files_of(place)
    before = _states(files)
    key = _key(place, before)
    if (known := _remembered(seen, key)) is not None:
        return known
    weights = checkpoint_facts(place)
    if _states(files) != before:
        remedy = "wait until it is written, and type the same command again"
        raise WeightsUnusable("changed while it was read", where=str(place), remedy=remedy)
    if remember and all(is_settled(mtime_ns, ctime_ns) for _, _, mtime_ns, ctime_ns in before):
        with seen.writer() as writer:
            writer.put(key, {}, weights.to_json())
    return weights


def key_as_it_stands(place: Path) -> bytes:
    """Return the key under which a checkpoint is remembered while none of its files changes."""
    return _key(place, _states(files_of(place)))


def check_published(path: Path, name: str) -> PublishedMatch:
    """Compare a checkpoint's file with what was published under that name; a file that differs is refused."""
    files, model = files_of(path), published(name)
    if model is None or len(files.tensors) != 1:
        return PublishedMatch.UNKNOWN
    (file,) = files.tensors
    is_pt = file.suffix == ".pt"
    expected, size = (model.pt_sha256, model.pt_bytes) if is_pt else (model.safetensors_sha256, None)
    if expected is None:
        return PublishedMatch.UNKNOWN
    remedy = f"pipeline weights fetch {name}   (or give your own model a name of its own)"
    if size is not None and (found := file.stat().st_size) != size:
        raise WeightsUnusable(
            f"has {found:,} bytes; {name} was published with {size:,}", where=str(file), remedy=remedy
        )
    if (sha256 := sha256_of(file)) != expected:
        what = f"is not {name} as it was published: its SHA-256 is {sha256}, and should be {expected}"
        raise WeightsUnusable(what, where=str(file), remedy=remedy)
    return PublishedMatch.EQUAL


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                hasher.update(block)
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    return hasher.hexdigest()


def checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read a checkpoint, every tensor of it, and say what it is; one that could not be used is refused."""
    from pipeline.encoder.checkpoints.esm_checkpoint import (
        digest_weights,
        dtype_name,
        load_checkpoint,
        refuse_not_finite,
    )

    checkpoint = load_checkpoint(path)
    refuse_not_finite(checkpoint)
    shape, size_bytes = checkpoint.architecture, sum(file.stat().st_size for file in files_of(path).all)
    facts = (digest_weights(checkpoint), shape.layers, shape.dim, shape.heads, dtype_name(checkpoint.dtype), size_bytes)
    return CheckpointFacts(checkpoint.name, checkpoint.form, str(path), *facts)


def _states(files: CheckpointFiles) -> list[tuple[str, int, int, int]]:
    """Return the path, size and times of every file of a checkpoint; any write changes one of them."""
    return [(str(path.absolute()), *_state(path)) for path in files.all]


def _key(place: Path, states: list[tuple[str, int, int, int]]) -> bytes:
    return recipe_key("weights", {"version": WEIGHTS_VERSION, "path": str(place.absolute()), "files": states})


def _state(path: Path) -> tuple[int, int, int]:
    """Return the size and the times of a file."""
    try:
        state = path.stat()
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _remembered(seen: Store, key: bytes) -> CheckpointFacts | None:
    """Return what is remembered under a key; a damaged record counts as missing, and is made anew."""
    if seen.missing([key]):
        return None
    try:
        return CheckpointFacts.from_json(seen.get(key).meta)
    except (CacheDamaged, RecordMissing) as error:
        log.warning("%s: %s: made anew", error.where, error.what)
        return None


def _places(path: Path) -> Iterator[Path]:
    """Yield where a checkpoint may lie, the likeliest first; of those with a public name, in the shared folders too."""
    yield path
    if path.suffix in _SUFFIXES:
        yield path.with_suffix("")
    else:
        yield path.with_name(f"{path.name}.pt")
    model = published(stem(path))
    if model is not None:
        yield _home("TORCH_HOME", "torch") / "hub" / "checkpoints" / f"{model.name}.pt"
        yield from _snapshots(model.name)


def stem(path: Path) -> str:
    """Return the model's name in a path."""
    return path.stem if path.suffix in _SUFFIXES else path.name


def _home(variable: str, name: str) -> Path:
    """Return the folder in which a library keeps what it downloaded."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(variable) or f"{caches}/{name}").expanduser()


def _snapshots(name: str) -> Iterator[Path]:
    """Yield where Hugging Face keeps a model: the revision that main was last seen at, then any other."""
    hub = os.environ.get("HF_HUB_CACHE")
    folder = (Path(hub).expanduser() if hub else _home("HF_HOME", "huggingface") / "hub") / f"models--facebook--{name}"
    try:
        yield folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        yield folder / "snapshots"
    try:
        yield from sorted((folder / "snapshots").iterdir())
    except OSError:
        return


def _is_there(path: Path) -> bool:
    """Say whether there is anything at a path that was named, also if it may not be looked at."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _is_checkpoint(path: Path) -> bool:
    """Say whether a place that nobody named has what could be a checkpoint."""
    try:
        if path.suffix == ".pt":
            return path.is_file()
        return (path / CONFIG).is_file() and any((path / name).is_file() for name in (INDEX, SINGLE))
    except OSError:  # the caches of others may be closed
        return False


_HOST = "https://dl.fbaipublicfiles.com/fair-esm"


@dataclass(frozen=True, slots=True)
class Published:
    """A published model; a digest or a size is None where no public source states it."""

    name: str
    layers: int
    dim: int
    heads: int
    pt_bytes: int | None = None
    pt_sha256: str | None = None
    safetensors_sha256: str | None = None  # of Hugging Face's facebook/NAME, where it is one file

    @property
    def url(self) -> str:
        """Where fair-esm's checkpoint is."""
        return f"{_HOST}/models/{self.name}.pt"


# Digests and sizes are those that Synthyra/FastPLMs pins in src/fastplms/models.toml (commit 077c1765). Each SHA-256 is
# stated the same by other public repositories, among them DeepRank-Ab (650M), SimpleFold's and Protenix's ports (3B).
# Of 15B, and of the parts that Hugging Face's 3B comes in, we found none.
MODELS = (
    Published(
        "esm2_t6_8M_UR50D", 6, 320, 20, 30_099_493,
        "46f002a9870c9bdecd0ea887acb1f9a38a6b561e8f8bf8a6990b679b9d31b928",
        "24c5fa474c48f3b754b86efe752d5f189d2bcd88190fa2270fc92b2ef3034189",
    ),
    Published(
        "esm2_t12_35M_UR50D", 12, 480, 20, 134_095_705,
        "7f21e80e61d16a71735163ef555d3009afb0c98da74c48e29df08606973cc55e",
        "e35647818e0e064351d4531ed480d225a002567b4b2b93ad3a9246d753150fc0",
    ),
    Published(
        "esm2_t30_150M_UR50D", 30, 640, 20, 592_774_773,
        "881c7176cf198ef8dec26a3c375d40eb58d0c33df95c22562ca6cc6d3f812c62",
        "c3f1da8aea53bddd32c246c86168c23b9fd72341fb9db9a94436f855f5053566",
    ),
    Published(
        "esm2_t33_650M_UR50D", 33, 1280, 20, 2_604_537_549,
        "ea9d0522b335a8778dea6535a65301f10208dece28cd5865482b0b1fc446168c",
        "a08adabb949fa67ad3c14b509d04fd60368b35007b0095e3358f81200c4f4db0",
    ),
    Published(
        "esm2_t36_3B_UR50D", 36, 2560, 40, 5_678_116_398,
        "7de8b4082ba15891959ab368b77ce3886697af1efb16d3c9e9e7b0c5d3f07500",
    ),
    Published("esm2_t48_15B_UR50D", 48, 5120, 40),
)  # fmt: skip


def published(name: str) -> Published | None:
    """Return the published model of that name."""
    return next((model for model in MODELS if model.name == name), None)
