"""Checkpoints with objects of other people's classes: these are replaced by objects that do nothing.

A checkpoint of Lightning names the classes of its settings, and a TorchScript archive those of its modules. Nobody has
those packages, and nothing of them is imported or run; only tensors and plain data are wanted. What names a function,
or anything of Python's own library but containers of values, is refused by that name.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Of Python's and NumPy's, what only holds values; a name that ends with a dot is a module's.
VALUES = (
    "pathlib.", "datetime.", "decimal.", "uuid.", "collections.", "types.SimpleNamespace", "argparse.Namespace",
    "numpy.dtype", "numpy.dtypes.", "numpy.ndarray", "numpy.core.multiarray.", "numpy._core.multiarray.",
)  # fmt: skip
OF_MODULES = "__torch__."  # where a TorchScript archive has its own classes
SCRIPT = "constants.pkl"  # a member that only such an archive has
KNOWN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": lambda flat, offset, size, stride, *_: flat.as_strided(size, stride, offset),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.jit._pickle.restore_type_tag": lambda value, _type: value,
    **{f"torch.jit._pickle.build_{kind}list": list for kind in ("int", "double", "bool", "tensor")},
}
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Inert:
    """Stands for an object of an unknown class: it can be made and filled, and does nothing."""

    state: Any = None

    def __new__(cls, *_arguments: Any, **_named: Any) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def stood_in(names: Sequence[str]) -> list[Any]:
    """Return what torch's restricted unpickler is to take for these names; leave out what it must refuse."""
    return [(Inert, name) for name in names if _is_of_values(name) or _is_foreign_class(name)]


def _is_of_values(name: str) -> bool:
    return any(name.startswith(known) if known.endswith(".") else name == known for known in VALUES)


def _is_foreign_class(name: str) -> bool:
    """Tell the class of a package by its capital; functions, which would be called, have none."""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    return package not in {*sys.stdlib_module_names, "torch", "numpy"} and last.lstrip("_")[:1].isupper()


class _ScriptUnpickler(pickle.Unpickler):
    """Reads the data of a TorchScript archive: tensors, containers, and inert objects in place of its modules."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.".startswith(OF_MODULES):
            return Inert
        known = KNOWN.get(f"{module}.{name}") or (module == "torch" and STORAGES.get(name))
        if not known:
            problem = f"GLOBAL {module}.{name}"
            raise pickle.UnpicklingError(problem)
        return known

    def persistent_load(self, place: Any) -> Any:
        _, dtype, key, _, numbers = place
        data = bytearray(self.archive.read(f"{self.root}data/{key}"))
        return torch.frombuffer(data, dtype=dtype, count=numbers) if numbers else torch.empty(0, dtype=dtype)


def script_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a TorchScript archive by name, as its modules have them; none of its code is loaded."""
    with zipfile.ZipFile(path) as archive:
        place = next(name for name in archive.namelist() if name.endswith(f"/{SCRIPT}"))
        return dict(_below(_ScriptUnpickler(archive, place.removesuffix(SCRIPT)).load(), ""))


def _below(held: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an inert module and of those within it."""
    if isinstance(held, torch.Tensor):
        yield name, held
    elif isinstance(held, Inert) and isinstance(held.state, dict):
        for key, value in held.state.items():
            yield from _below(value, f"{name}.{key}" if name else key)
