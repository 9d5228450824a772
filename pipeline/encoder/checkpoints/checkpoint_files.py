"""Which files a checkpoint is made of; looks at names and at config.json, never at weights."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, WeightsUnusable

if TYPE_CHECKING:
    from pathlib import Path

FAIR_ESM, HUGGING_FACE = "fair-esm", "hugging-face"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MAIN_MODEL = "esm2_t33_650M_UR50D"
USE_ESM2 = f"set embed.weights to an ESM-2 checkpoint, for example of: pipeline weights fetch {MAIN_MODEL}"
FETCH_AGAIN = "bring it once more: pipeline weights fetch NAME, or pipeline weights import FILE"
_JSON_BYTES = 64 << 20  # a larger one is no configuration


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one checkpoint; `others` are those that say how the tensors belong together."""

    name: str
    form: str
    tensors: tuple[Path, ...]
    others: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that can change what is read."""
        return self.others + self.tensors


def files_of(path: Path) -> CheckpointFiles:
    """Return the files of the checkpoint at a path: a .pt file, a .safetensors file, or a Hugging Face folder."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is a link to a file that is not there" if path.is_symlink() else "there is no such checkpoint"
        raise ConfigError(what, where=str(path), remedy=USE_ESM2) from error
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    if stat.S_ISDIR(mode):
        return _folder(path)
    if not stat.S_ISREG(mode):
        raise WeightsUnusable("is neither a file nor a folder", where=str(path), remedy=USE_ESM2)
    if path.name == CONFIG or path.name.endswith(".index.json"):
        raise WeightsUnusable(
            "describes weights, and has none", where=str(path), remedy=f"name its folder: {path.parent}"
        )
    if path.suffix == ".bin":
        raise _needs_safetensors(path, path.parent)
    if path.suffix == ".safetensors":
        return _one_of_folder(path)
    return CheckpointFiles(path.stem, FAIR_ESM, (path,))


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that stands beside the weights."""
    try:
        text = path.read_bytes() if path.stat().st_size <= _JSON_BYTES else b""
        data = json.loads(text)
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    except (ValueError, RecursionError) as error:
        raise WeightsUnusable(f"is not JSON: {str(error)[:100]}", where=str(path), remedy=FETCH_AGAIN) from error
    if not isinstance(data, dict):
        raise WeightsUnusable("is not a JSON object", where=str(path), remedy=FETCH_AGAIN)
    return data


def unreadable_checkpoint(path: Path, error: OSError) -> WeightsUnusable:
    """Say why a file cannot be read."""
    return WeightsUnusable(f"cannot be read: {error.strerror or error}", where=str(path), remedy=f"ls -ldL {path}")


def _folder(folder: Path) -> CheckpointFiles:
    """Return the files of a Hugging Face folder."""
    try:
        found = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise unreadable_checkpoint(folder, error) from error
    if CONFIG not in found:
        what = f"the folder has no {CONFIG}, so it is not a Hugging Face model"
        pt = next((folder / name for name in found if name.endswith(".pt")), None)
        raise WeightsUnusable(what, where=str(folder), remedy=f"set embed.weights to {pt}" if pt else USE_ESM2)
    if INDEX in found:
        return CheckpointFiles(_name(folder), HUGGING_FACE, _shards(folder), (folder / CONFIG, folder / INDEX))
    if SINGLE in found:
        return CheckpointFiles(_name(folder), HUGGING_FACE, (folder / SINGLE,), (folder / CONFIG,))
    if any(name.startswith("pytorch_model") for name in found):
        raise _needs_safetensors(folder, folder)
    raise WeightsUnusable(f"the folder has neither {SINGLE} nor {INDEX}", where=str(folder), remedy=FETCH_AGAIN)


def _one_of_folder(path: Path) -> CheckpointFiles:
    """Return the files of a checkpoint that was named by one .safetensors file; a part stands for all of them."""
    folder = path.parent
    if (folder / INDEX).is_file() and path in (shards := _shards(folder)):
        return CheckpointFiles(_name(folder), HUGGING_FACE, shards, (folder / CONFIG, folder / INDEX))
    if not (folder / CONFIG).is_file():
        what = f"there is no {CONFIG} beside it, which says how many heads the model has"
        raise WeightsUnusable(what, where=str(path), remedy=f"copy the model's {CONFIG} to {folder}")
    return CheckpointFiles(_name(folder), HUGGING_FACE, (path,), (folder / CONFIG,))


def _shards(folder: Path) -> tuple[Path, ...]:
    """Return the parts that an index names."""
    index = folder / INDEX
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(_is_plain(name) for name in names.values()):
        raise WeightsUnusable("names no files of this folder in weight_map", where=str(index), remedy=FETCH_AGAIN)
    shards = tuple(folder / name for name in sorted(set(names.values())))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        what = f"{len(missing)} of its {len(shards)} parts are missing: {', '.join(missing[:4])}"
        raise WeightsUnusable(what, where=str(folder), remedy=FETCH_AGAIN)
    return shards


def _is_plain(name: object) -> bool:
    """Say whether a name stays in its folder."""
    return isinstance(name, str) and name.endswith(".safetensors") and not {"/", "\\", "\0"} & set(name)


def _name(folder: Path) -> str:
    """Return the model's name: the folder's, or what Hugging Face's cache has two folders above its snapshot."""
    folder = folder.absolute()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    return folder.name


def _needs_safetensors(path: Path, folder: Path) -> WeightsUnusable:
    """Say why a pickle of Hugging Face is not read, and how it becomes what is."""
    what = "the weights are there as pytorch_model.bin only; of Hugging Face's forms, safetensors is read"
    script = f"from transformers import EsmModel as M; M.from_pretrained('{folder}').save_pretrained('{folder}')"
    return WeightsUnusable(what, where=str(path), remedy=f'where transformers is installed: python -c "{script}"')
