"""Numbers that the published systems gave, and the files they read and wrote: the README of each folder has the facts.

    outputs = recorded("dreams/outputs")         # NAME.safetensors, by name
    facts = document("dreams/hparams")          # NAME.json
    path = checkpoint("dreams/ssl_model.ckpt")  # the original's container, assembled

A file that is missing fails the test that asks for it.

To keep the folder small, weights that an original's initialisation drew are stored as their place in torch's stream of
random numbers (NAME.drawn.json), and tensors that are equal once. All come back bit for bit.
"""

from __future__ import annotations

import atexit
import json
import lzma
import shutil
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
BLOCK = 16  # numbers that torch draws from a normal distribution at once


@cache
def document(name: str) -> Any:
    """Return a JSON document."""
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def recorded(name: str) -> dict[str, Tensor]:
    """Return tensors by name, those included that are stored as draws or as equal to another."""
    found = load_file(FOLDER / f"{name}.safetensors")
    if (FOLDER / f"{name}.drawn.json").exists():
        found |= _drawn(document(f"{name}.drawn"), FOLDER / f"{name}.corrections.xz")
        found |= {alias: found[same] for alias, same in document(f"{name}.drawn")["same"].items()}
    return found


def _drawn(facts: dict[str, Any], corrections: Path) -> dict[str, Tensor]:
    """Draw as torch does on a CPU: 24 bits a number, of one generator; torch.nn.init makes weights of them."""
    size = max(place + int(np.prod(shape)) for place, shape, _ in facts["tensors"].values()) + BLOCK
    bits = np.frombuffer(np.random.RandomState(facts["seed"]).bytes(4 * size), "<u4") & 0xFFFFFF
    found = {}
    for name, (place, shape, spread) in facts["tensors"].items():
        if facts["kind"] == "uniform":
            share = bits[place : place + int(np.prod(shape))] * 2.0**-24
            low, high = np.float32(-spread), np.float32(spread)
            values = (share * float(high - low) + float(low)).astype(np.float32)
        else:
            values = _normal(bits[place:], int(np.prod(shape)), spread)
        found[name] = torch.from_numpy(values.reshape(shape))
    if facts["kind"] == "normal":
        found["encoder.tr_final_layer.3.weight"] *= 0.2
        # The recording machine did not round logarithm and sine correctly: 15% of the numbers differ in the last bits.
        off = np.frombuffer(lzma.decompress(corrections.read_bytes()), np.int8).astype(np.int32)
        parts = np.split(off, np.cumsum([one.numel() for one in found.values()])[:-1])
        for values, part in zip(found.values(), parts, strict=True):
            values.view(torch.int32).add_(torch.from_numpy(part).view(values.shape))
    return found


def _normal(bits: Any, count: int, deviation: float) -> Any:
    """Turn uniform numbers into normal ones, in single precision; a last block that is not full is drawn again."""
    values = np.empty(count, np.float32)
    whole = count - count % BLOCK
    values[:whole] = _boxes(bits[:whole], deviation)
    if count % BLOCK:
        values[-BLOCK:] = _boxes(bits[count : count + BLOCK], deviation)
    return values


def _boxes(bits: Any, deviation: float) -> Any:
    first, second = ((bits * 2.0**-24).astype(np.float32).reshape(-1, 2, BLOCK // 2)).swapaxes(0, 1)
    radius = np.sqrt(np.float32(-2) * np.log((1 - first).astype(float)).astype(np.float32))
    angle = (np.float32(2 * np.pi) * second).astype(float)
    sides = [radius * turn(angle).astype(np.float32) for turn in (np.cos, np.sin)]
    return (np.stack(sides, 1).astype(float) * float(np.float32(deviation))).astype(np.float32).reshape(-1)


@cache
def docking_complex(name: str) -> dict[str, Tensor]:
    """Return the input of a complex; its pseudo-embeddings are drawn by a digest of its tokens, as the recorder did."""
    found = {
        key.removeprefix(f"{name}."): one
        for key, one in recorded("diffdock_pp/inputs").items()
        if key.startswith(f"{name}.")
    }
    for role in ("receptor", "ligand"):
        token_N = found[f"{role}.token"].numpy()
        drawn = np.random.default_rng(zlib.crc32(token_N.tobytes())).standard_normal((len(token_N) + 2, 1280))
        esm_ND = (drawn.astype(np.float32) * np.float32(0.15))[1:-1]
        esm_ND[:, 0] = found[f"{role}.esm.first"].numpy()
        found[f"{role}.esm"] = torch.from_numpy(esm_ND)
    return found


@cache
def _assembled() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="reference-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def checkpoint(name: str) -> Path:
    """Assemble a checkpoint: the original's own pickle, and its storages from the state that is stored once.

    Storages of optimizers, and of averages, are zero.
    """
    facts, path = document(f"{name}"), _assembled() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    state = recorded(facts["state"])
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(FOLDER / f"{name}.pkl", f"{path.stem}/data.pkl")
        archive.writestr(f"{path.stem}/byteorder", "little")
        for number, content in enumerate(facts["storages"]):
            data = bytes(content) if isinstance(content, int) else _bytes(state, content)
            archive.writestr(f"{path.stem}/data/{number}", data)
        archive.writestr(f"{path.stem}/version", "3\n")
    return path


def _bytes(state: dict[str, Tensor], name: str) -> bytes:
    if name.startswith("hex "):
        return bytes.fromhex(name[4:])
    name, is_half, _ = name.partition(" as half")
    return (state[name].half() if is_half else state[name]).numpy().tobytes()


@cache
def transformers_folder() -> Path:
    """Return CLIP's weights as a folder of transformers: the names are those that its save_pretrained wrote."""
    state, names = recorded("clip/state"), document("clip/hparams")["names_in_transformers"]
    found = {}
    for name, source in names.items():
        source, _, how = source.partition(" (")
        tensor = state[source]
        if how.startswith("third"):
            tensor = tensor.chunk(3)[int(how[6]) - 1]
        found[name] = (tensor.T if how.startswith("transposed") else tensor).contiguous()
    folder = _assembled() / "clip" / "transformers"
    folder.mkdir(parents=True)
    shutil.copy(FOLDER / "clip" / "transformers_config.json", folder / "config.json")
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder
