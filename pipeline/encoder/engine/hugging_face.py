"""Encoders from Hugging Face's transformers, by the protocol of users' encoders: ProtT5, Ankh, SaProt and others.

`embed: {encoder: "pipeline.encoder.engine.hugging_face:HuggingFace", weights: FOLDER}`. Nothing here imports
transformers or torch before there is something to encode.

SaProt reads with each residue a letter of its structure, 3Di: `structures` names a table of these, as
`foldseek structureto3didescriptor` writes it. An embedding is of a sequence, so the table is asked by the sequence.
"""

from __future__ import annotations

import logging
from array import array
from functools import cached_property
from importlib import metadata
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.command_line import install_extra
from pipeline.encoder.checkpoint_files import CONFIG, read_json_object
from pipeline.errors import ConfigError, DataError, JobFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

_T5 = ("t5", "mt5", "umt5")  # of which the encoder alone is wanted
_INSTALL = install_extra("transformers")
UNKNOWN = "#"  # of a residue whose structure is not known, or not the same in all chains of one sequence
_WHERE = "embed.options.structures"
_ASKED = 100  # sequences, of which some should be in a table; what compares encoders asks for a few of its own

log = logging.getLogger(__name__)


class HuggingFace:
    """A model of theirs in a local folder, with its own tokenizer.

    `residue` is how a residue is written for that: "{} " for ProtT5, "{}" for Ankh and ESM, "{}#" for SaProt, whose
    second letter is a residue's structure, and # says that it is not known. With `structures`, an absolute path, that
    letter stands for #.
    """

    version = 1

    def __init__(
        self,
        weights: Path,
        residue: str = "{}",
        letters: str = "ACDEFGHIKLMNPQRSTVWYX",
        longest: int = 0,
        structures: str | None = None,
    ) -> None:
        if "{}" not in residue:
            what = f"residue is {residue!r}: write {{}} for the letter, such as '{{}}#'"
            raise ConfigError(what, where="embed.options.residue", remedy="pipeline config check")
        if structures is not None and (UNKNOWN not in residue or not Path(structures).is_absolute()):
            what = f"structures is {structures!r}: give an absolute path; its letters replace the # of residue"
            raise ConfigError(what, where=_WHERE, remedy="options: {residue: '{}#', structures: /data/3di.tsv}")
        self._folder, self._residue, self.letters, self.longest = weights, residue, letters, longest
        self._structures = Path(structures) if structures else None

    @property
    def width(self) -> int:
        """Return the numbers of a row."""
        return self._said("d_model", "hidden_size")

    @property
    def cls(self) -> bool:
        """Tell whether a mark stands before a sequence: ESM and SaProt have one, ProtT5 and Ankh have none."""
        return self._marks > 0

    @property
    def layers(self) -> int:
        """Return how many layers there are."""
        return self._said("num_layers", "num_hidden_layers")

    def files_read(self) -> list[Path]:
        """Return the files beside the weights whose content decides the rows."""
        return [self._structures] if self._structures else []

    def model(self) -> nn.Module:
        """Return the encoder, from safetensors: nothing that is read is executed."""
        library = _library()
        kind = library.T5EncoderModel if self._config.get("model_type") in _T5 else library.AutoModel
        more = {"add_pooling_layer": False} if self._config.get("model_type") == "esm" else {}
        model: nn.Module = kind.from_pretrained(self._folder, local_files_only=True, use_safetensors=True, **more)
        return model

    def tokenize(self, sequence: str) -> Sequence[int]:
        """Return the tokens that their tokenizer makes of a sequence, one for each residue and its marks."""
        shapes = self._table.letters(sequence) if self._structures else UNKNOWN * len(sequence)
        written = zip(sequence, shapes, strict=True)
        text = "".join(self._residue.replace(UNKNOWN, shape).format(letter) for letter, shape in written)
        coded = self._tokenizer(text, return_special_tokens_mask=True)
        tokens: list[int] = coded["input_ids"]
        known = [number for number, mark in enumerate(coded["special_tokens_mask"]) if not mark]
        if known != list(range(self._marks, self._marks + len(sequence))) or self._tokenizer.unk_token_id in tokens:
            what = f"the tokenizer gives {len(known)} tokens for {len(sequence)} residues, or does not know some"
            remedy = (
                "--set embed.options.residue=…, as the model's documentation writes sequences, or embed.options.letters"
            )
            raise JobFailed(what, where=str(self._folder), remedy=remedy)
        return tokens

    def forward(self, model: nn.Module, token_BT: Tensor, is_token_BT: Tensor, layer: int) -> Tensor:
        """Return the rows of a layer, the last one's after the model's last norm; first that of a mark, if any."""
        token_BT = token_BT.masked_fill(~is_token_BT, self._config.get("pad_token_id") or 0)
        is_last = layer == self.layers
        made = model(input_ids=token_BT, attention_mask=is_token_BT.long(), output_hidden_states=not is_last)
        rows_BTD: Tensor = made.last_hidden_state if is_last else made.hidden_states[layer]
        return rows_BTD[:, self._marks - self.cls :]

    @cached_property
    def _table(self) -> StructureTable:
        assert self._structures is not None
        return StructureTable(self._structures)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json_object(self._folder / CONFIG)

    def _said(self, *names: str) -> int:
        """Return a number of the configuration, which has one of several names; 0 where it has none."""
        return int(next((self._config[name] for name in names if name in self._config), 0))

    @cached_property
    def _tokenizer(self) -> Any:
        library = _library()
        try:
            return library.AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError) as error:
            what = f"the tokenizer cannot be read: {str(error).strip().partition(chr(10))[0]}"
            remedy = "copy all files of the model there, including its tokenizer"
            raise ConfigError(what, where=str(self._folder), remedy=remedy) from error

    @cached_property
    def _marks(self) -> int:
        """The marks that stand before a sequence."""
        coded = self._tokenizer(self._residue.format(self.letters[0]), return_special_tokens_mask=True)
        mask: list[int] = coded["special_tokens_mask"]
        return mask.index(0) if 0 in mask else 0


class StructureTable:
    """The 3Di letters of sequences, in a table that stays on disk: of each row 16 bytes are in memory.

    In its first columns, parted by tabs, are name, sequence and letters; others are not read.
    """

    def __init__(self, path: Path) -> None:
        self._path, marks, places, at = path, array("Q"), array("Q"), 0
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    marks.append(_mark(self._row(line, number)[0]))
                    places.append(at)
                    at += len(line)
        except OSError as error:
            raise DataError(f"cannot be read: {error}", where=str(path), remedy=f"--set {_WHERE}=FILE") from error
        mark_R, place_R = np.frombuffer(marks, np.uint64), np.frombuffer(places, np.uint64)
        order = np.argsort(mark_R, kind="stable")
        self._mark_R, self._place_R = mark_R[order], place_R[order]
        self._asked = self._known = 0

    def letters(self, sequence: str) -> str:
        """Return the letters of a sequence, or of a window of one; # where the table has none, or several."""
        text = sequence.encode()
        found = [shapes for whole, shapes in self._rows_of(text) if whole == text]
        found = found or [shapes[at : at + len(text)] for shapes, at in self._windows_of(text)]
        self._count(is_known=bool(found))
        agreed = (chr(letters[0]) if len({*letters}) == 1 else UNKNOWN for letters in zip(*found, strict=True))
        return "".join(agreed) if found else UNKNOWN * len(text)

    def _rows_of(self, text: bytes) -> Iterator[tuple[bytes, bytes]]:
        first, last = (np.searchsorted(self._mark_R, np.uint64(_mark(text)), side) for side in ("left", "right"))
        with self._path.open("rb") as lines:
            for place in self._place_R[first:last].tolist():
                lines.seek(place)
                yield self._row(lines.readline())

    def _windows_of(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the letters of each row whose sequence has a text within it, and where that begins."""
        if not len(self._mark_R):
            return
        with self._path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as table:
            at = table.find(text)
            while at >= 0:
                table.seek(table.rfind(b"\n", 0, at) + 1)
                whole, shapes = self._row(table.readline())
                if (within := whole.find(text)) >= 0:  # not in a name, nor among the letters
                    yield shapes, within
                at = table.find(text, table.tell())

    def _count(self, *, is_known: bool) -> None:
        """Say once where a table seems to be of other sequences."""
        self._asked, self._known = self._asked + 1, self._known + is_known
        if self._asked == _ASKED and not self._known:
            log.warning("%s: contains none of %d sequences, so their residues are read with #", self._path, _ASKED)

    def _row(self, line: bytes, number: int = 0) -> tuple[bytes, bytes]:
        """Return sequence and letters of a row."""
        cells = line.rstrip(b"\r\n").split(b"\t", 3)
        if len(cells) < 3 or len(cells[1]) != len(cells[2]) or not cells[2].isalpha():
            what = f"line {number} must have a name, a sequence and as many 3Di letters, tab-separated"
            raise DataError(what, where=str(self._path), remedy="foldseek structureto3didescriptor STRUCTURE TABLE")
        return cells[1].upper(), cells[2].lower()


def _mark(sequence: bytes) -> int:
    return xxhash.xxh3_64_intdigest(sequence)


def library_version() -> str:
    """Return the version of their library; empty where it is not installed."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


def _library() -> Any:
    """Return their library; say how to install it where it is not."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        what = "this encoder needs the package transformers, which is not installed"
        raise ConfigError(what, where="embed.encoder", remedy=_INSTALL) from None
    return transformers
