"""The files of a checkpoint, the families that are read, and the table of published models; never looks at weights."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.command_line import quoted
from pipeline.errors import ConfigError, WeightsUnusable

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

FAIR_ESM, HUGGING_FACE, EVOLUTIONARY_SCALE = "fair-esm", "hugging-face", "evolutionary-scale"
ESM2, ESM1B, ESMC = "esm2", "esm1b", "esmc"
FAMILIES = {ESM2: "ESM-2", ESM1B: "ESM-1b or ESM-1v", ESMC: "ESM C"}
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MAIN_MODEL = "esm2_t33_650M_UR50D"
USE_ESM2 = f"set embed.weights to an ESM-2 checkpoint, for example of: pipeline weights fetch {MAIN_MODEL}"
FETCH_AGAIN = "get it again: pipeline weights fetch NAME, or pipeline weights import FILE"
BLOCK_BYTES = 1 << 20
_CONVERT = "; where transformers is installed, AutoModel.from_pretrained('{0}').save_pretrained('{0}') writes it"
_JSON_BYTES = 64 << 20  # a larger one is no configuration


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one checkpoint; `others` are its config.json and index."""

    name: str
    form: str
    tensors: tuple[Path, ...]
    others: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        return self.others + self.tensors


def files_of(path: Path) -> CheckpointFiles:
    """Return the files of the checkpoint at a path: a .pt file, a .safetensors file, or a Hugging Face folder."""
    try:
        mode = path.stat().st_mode
        names = {entry.name for entry in path.iterdir()} if stat.S_ISDIR(mode) else set()
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is a link to a missing file" if path.is_symlink() else "checkpoint not found"
        raise ConfigError(what, where=str(path), remedy=USE_ESM2) from error
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    if stat.S_ISDIR(mode):
        return _folder(path, names)
    if not stat.S_ISREG(mode):
        raise unusable("is neither a file nor a folder", path)
    if path.name == CONFIG or path.name.endswith((".index.json", ".bin")):
        remedy = f"use its folder: {path.parent}, with {SINGLE}{_CONVERT.format(path.parent)}"
        raise unusable("is not a file of safetensors", path, remedy)
    if path.suffix != ".safetensors":
        return CheckpointFiles(path.stem, FAIR_ESM, (path,))
    whole = _folder(path.parent, {CONFIG, INDEX} if (path.parent / INDEX).is_file() else {CONFIG, SINGLE})
    return whole if path in whole.tensors else replace(whole, tensors=(path,))  # one part stands for all


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that stands beside the weights."""
    try:
        text = path.read_bytes() if path.stat().st_size <= _JSON_BYTES else b""
        data = json.loads(text)
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    except (ValueError, RecursionError) as error:
        raise unusable(f"is not JSON: {str(error)[:100]}", path, FETCH_AGAIN) from error
    if not isinstance(data, dict):
        raise unusable("is not a JSON object", path, FETCH_AGAIN)
    return data


def unusable(what: str, path: Path, remedy: str = USE_ESM2) -> WeightsUnusable:
    """Return the error for a checkpoint that cannot be used."""
    return WeightsUnusable(what, where=str(path), remedy=remedy)


def unreadable_checkpoint(path: Path, error: OSError) -> WeightsUnusable:
    """Return the error for a checkpoint file that cannot be read."""
    return unusable(f"cannot be read: {error.strerror or error}", path, f"ls -ldL {quoted(path)}")


def _folder(folder: Path, names: Container[str]) -> CheckpointFiles:
    """Return the files of a Hugging Face folder that has files of these names."""
    name, config = _name(folder), folder / CONFIG
    if CONFIG not in names or not config.is_file():
        what = f"there is no {CONFIG}, which has the number of heads"
        pt = next((file for file in sorted(folder.glob("*.pt"))), None)
        remedy = f"set embed.weights to {pt}" if pt else f"copy the model's {CONFIG} to {folder}, or {USE_ESM2}"
        raise unusable(what, folder, remedy)
    if INDEX in names:
        return CheckpointFiles(name, HUGGING_FACE, shards_of(folder), (config, folder / INDEX))
    if SINGLE in names:
        return CheckpointFiles(name, HUGGING_FACE, (folder / SINGLE,), (config,))
    what = f"the folder has neither {SINGLE} nor {INDEX}"
    raise unusable(what, folder, f"{FETCH_AGAIN}{_CONVERT.format(folder)}")


def shards_of(folder: Path) -> tuple[Path, ...]:
    """Return the weight files that an index names; refuse other paths and missing files."""
    index = folder / INDEX
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(_is_plain(name) for name in names.values()):
        raise unusable("names no file of this folder in weight_map", index, FETCH_AGAIN)
    shards = tuple(folder / name for name in sorted(set(names.values())))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        what = f"{len(missing)} of its {len(shards)} parts are missing: {', '.join(missing[:4])}"
        raise unusable(what, folder, FETCH_AGAIN)
    return shards


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not {"/", "\\", "\0"} & set(name)


def _name(folder: Path) -> str:
    """Return the model's name: the folder's, or in Hugging Face's cache that of the repository."""
    folder = folder.absolute()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    return folder.name


SUFFIXES = (".pt", ".pth", ".safetensors")


def stem(path: Path) -> str:
    """Return the model's name in a path."""
    return path.stem if path.suffix in SUFFIXES else path.name


@dataclass(frozen=True, slots=True)
class Published:
    """A published model; a digest is None where no public source states it."""

    name: str
    layers: int
    dim: int
    heads: int
    pt_sha256: str | None = None  # of fair-esm's file
    safetensors_sha256: str | None = None  # of Hugging Face's, where it is one file

    @property
    def family(self) -> str:
        return {"esm1": ESM1B, "esm2": ESM2, "esmc": ESMC}[self.name[:4]]

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """Return what tells it from others: its family and its sizes."""
        return self.family, self.layers, self.dim, self.heads

    @property
    def repository(self) -> str:
        """Where Hugging Face has it."""
        return f"biohub/ESMC-{self.name[5:].upper()}" if self.family == ESMC else f"facebook/{self.name}"

    @property
    def url(self) -> str:
        """The address of fair-esm's file, of ESM-2, ESM-1b and ESM-1v."""
        return f"https://dl.fbaipublicfiles.com/fair-esm/models/{self.name}.pt"


# Digests are those that Synthyra/FastPLMs pins in src/fastplms/models.toml (commit 077c1765). Each is stated the same
# by other public repositories, among them DeepRank-Ab (650M), SimpleFold's and Protenix's ports (3B). Of 15B, ESM-1b,
# ESM-1v, ESM C, and of the parts that Hugging Face's 3B comes in, we found none.
MODELS = (
    Published(
        "esm2_t6_8M_UR50D", 6, 320, 20,
        "46f002a9870c9bdecd0ea887acb1f9a38a6b561e8f8bf8a6990b679b9d31b928",
        "24c5fa474c48f3b754b86efe752d5f189d2bcd88190fa2270fc92b2ef3034189",
    ),
    Published(
        "esm2_t12_35M_UR50D", 12, 480, 20,
        "7f21e80e61d16a71735163ef555d3009afb0c98da74c48e29df08606973cc55e",
        "e35647818e0e064351d4531ed480d225a002567b4b2b93ad3a9246d753150fc0",
    ),
    Published(
        "esm2_t30_150M_UR50D", 30, 640, 20,
        "881c7176cf198ef8dec26a3c375d40eb58d0c33df95c22562ca6cc6d3f812c62",
        "c3f1da8aea53bddd32c246c86168c23b9fd72341fb9db9a94436f855f5053566",
    ),
    Published(
        "esm2_t33_650M_UR50D", 33, 1280, 20,
        "ea9d0522b335a8778dea6535a65301f10208dece28cd5865482b0b1fc446168c",
        "a08adabb949fa67ad3c14b509d04fd60368b35007b0095e3358f81200c4f4db0",
    ),
    Published(
        "esm2_t36_3B_UR50D", 36, 2560, 40,
        "7de8b4082ba15891959ab368b77ce3886697af1efb16d3c9e9e7b0c5d3f07500",
    ),
    Published("esm2_t48_15B_UR50D", 48, 5120, 40),
    Published("esm1b_t33_650M_UR50S", 33, 1280, 20),
    *(Published(f"esm1v_t33_650M_UR90S_{seed}", 33, 1280, 20) for seed in range(1, 6)),
    Published("esmc_300m", 30, 960, 15),
    Published("esmc_600m", 36, 1152, 18),
    Published("esmc_6b", 80, 2560, 40),
)  # fmt: skip


def published(name: str) -> Published | None:
    """Return the published model of that name."""
    return next((model for model in MODELS if model.name == name), None)
