"""Sources of encoders: a checkpoint that the packed forward pass runs, or a class of the user's.

Shapes: R residues of all sequences, L of one, B sequences, T tokens of the longest, D width.
"""

from __future__ import annotations

import math
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch

from pipeline.command_line import Command
from pipeline.device.accelerator import free_caches, is_card, is_out_of_memory, unless_out_of_memory
from pipeline.encoder import parity
from pipeline.encoder.checkpoint_files import ESMC
from pipeline.encoder.esm2 import TYPICAL, EsmEncoder
from pipeline.encoder.esm_checkpoint import DTYPES, load_esm_checkpoint
from pipeline.encoder.weights import identify
from pipeline.errors import JobFailed, PipelineError
from pipeline.protocol import Referenced, has_cls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.encoder.esm_checkpoint import EsmCheckpoint
    from pipeline.protocol import Encoder
    from pipeline.store.store import Store

    Letters = NDArray[np.uint8]  # of a sequence, as bytes

_PROBES = (64, TYPICAL)  # residues
_PADDING = 1.25  # a batch is cut where padding would exceed this multiple of its tokens


@dataclass(frozen=True, slots=True)
class EsmSource:
    """A checkpoint of ESM-2, ESM-1b, ESM-1v or ESM C, from which the stage builds encoders."""

    checkpoint: EsmCheckpoint
    remedy: ClassVar = Command.of(  # for an error in full precision
        "weights check", then="   (and report this: the encoder does not match these weights)"
    )

    @classmethod
    def at(cls, path: Path) -> EsmSource:
        return cls(load_esm_checkpoint(path))

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def place(self) -> str:
        """Return where an error points to."""
        return str(self.checkpoint.path)

    @property
    def dim(self) -> int:
        return self.checkpoint.architecture.dim

    @property
    def reference(self) -> str:
        """Say what encoders are compared with."""
        return "a plain forward pass of ESM C" if self.checkpoint.architecture.family == ESMC else "fair-esm"

    def digest(self, seen: Store) -> str:
        """Return the digest of the weights as they are on disk now."""
        return identify(self.checkpoint.path, seen).digest

    def compared(
        self, precision: str, layer: int, device: str, *, cls: bool = False
    ) -> tuple[parity.ParityVerdict, EsmEncoder]:
        """Return how close an encoder comes to the reference, and that encoder; where `cls`, its mark's row, too."""
        return parity.check_parity(self.checkpoint, precision, layer, device, cls=cls)

    def build(self, *, layer: int, precision: str, device: torch.device) -> EsmEncoder:
        """Return an encoder, after one like it passed the gate."""
        return EsmEncoder(self.checkpoint, layer=layer, precision=precision, device=device)


@dataclass(frozen=True, slots=True)
class OwnSource:
    """A class of the user's, or one in this package for another library's models."""

    name: str
    encoder: Encoder
    stands: Callable[[], str]  # the digest of its code and its weights as they are now
    remedy: ClassVar[str] = (
        "correct forward(): rows must not depend on padding or randomness   (one at a time: padded = False)"
    )

    @property
    def place(self) -> str:
        return f"embed.encoder: {self.name}"

    @property
    def dim(self) -> int:
        return self.encoder.width

    @property
    def reference(self) -> str:
        return "its reference()" if isinstance(self.encoder, Referenced) else "itself, one sequence at a time"

    def digest(self, seen: Store) -> str:  # noqa: ARG002 - its own facts are remembered elsewhere
        return self.stands()

    def compared(
        self, precision: str, layer: int, device: str, *, cls: bool = False
    ) -> tuple[parity.ParityVerdict, OwnForward]:
        """Compare it with its reference; without one, with itself in fp32, each sequence alone.

        This detects a model that ignores its mask, or that draws random numbers. The row of the mark, which no
        reference gives, is compared with its own.
        """
        readable = ("".join(filter(self.encoder.letters.__contains__, text)) for text in parity.sample_sequences())
        sequences = [text[: self.encoder.longest or None] for text in readable if text]

        def encoded() -> tuple[list[parity.Rows], OwnForward, list[parity.Rows]]:
            wanted = self._wanted(sequences, layer, device, cls=cls)
            free_caches(device)
            encoder = self.build(layer=layer, precision=precision, device=torch.device(device))
            return wanted, encoder, _arrays(encoder.together([as_letters(text) for text in sequences], cls=cls))

        compared = unless_out_of_memory(encoded)
        if compared is None:
            raise parity.no_room(f"comparing {self.name} with its reference does", device, where=self.place)
        wanted, encoder, found = compared
        return parity.judge_rows(found, wanted, precision, cls=cls), encoder

    def build(self, *, layer: int, precision: str, device: torch.device) -> OwnForward:
        return OwnForward(self.encoder, self.name, layer=layer, precision=precision, device=device)

    def _wanted(self, sequences: list[str], layer: int, device: str, *, cls: bool) -> list[parity.Rows]:
        """Return the rows as the reference has them; without one, as each sequence has them alone, in fp32."""
        known: list[parity.Rows] = []
        if isinstance(self.encoder, Referenced):
            with blaming_encoder(self.name), torch.inference_mode():
                known = [np.asarray(rows) for rows in self.encoder.reference(sequences, layer)]
            found, right = [rows.shape for rows in known], [(len(text), self.dim) for text in sequences]
            if found != right:
                what = f"reference() of {self.name} gave rows of the shapes {found}; {right} are residues and width"
                raise JobFailed(what, where="embed.encoder", remedy=_CORRECT)
            if not cls:
                return known
        encoder = self.build(layer=layer, precision="fp32", device=torch.device(device))
        alone = _arrays([encoder([as_letters(text)], cls=cls) for text in sequences])
        return [np.concatenate([rows[:1], own]) for rows, own in zip(alone, known, strict=True)] if known else alone


EncoderSource: TypeAlias = EsmSource | OwnSource


class OwnForward:
    """An encoder of the user's on one device, in one precision, up to one layer; sequences come as their letters."""

    fill = 1

    def __init__(self, encoder: Encoder, name: str, *, layer: int, precision: str, device: torch.device) -> None:
        self.dim, self.longest = encoder.width, encoder.longest
        self.typical = as_letters(encoder.letters[0] * min(TYPICAL, self.longest or TYPICAL))
        self._encoder, self._name, self._layer, self._device = encoder, name, layer, device
        self._is_padded = getattr(encoder, "padded", True)
        with blaming_encoder(name):
            self._marks = int(has_cls(encoder))
            self._model = encoder.model().eval().requires_grad_(requires_grad=False).to(device, DTYPES[precision])
        self._of_residue, self._of_pair = self._measured()

    def tokenize(self, sequence: str) -> Letters:
        """Return the letters; the encoder makes its own tokens of a whole window."""
        return as_letters(sequence)

    def bytes_per_token(self, residues: int = TYPICAL) -> int:
        """Return the memory that a token takes in a sequence of this length: attention may hold every pair."""
        return math.ceil(self._of_residue + self._of_pair * residues) + 1

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[Letters], *, cls: bool = False) -> torch.Tensor:
        """Return the rows of all residues, in order; where `cls`, before those of each sequence that of its mark."""
        parts = self._batches(tokens) if self._is_padded and is_card(self._device) else ([one] for one in tokens)
        return torch.cat([rows_LD for part in parts for rows_LD in self._encoded(part, cls=cls)])

    @torch.inference_mode()
    def together(self, tokens: Sequence[Letters], *, cls: bool = False) -> list[torch.Tensor]:
        """Return the rows of each sequence, all of them padded to one length where that is allowed."""
        if self._is_padded:
            return self._encoded(tokens, cls=cls)
        return [rows_LD for letters in tokens for rows_LD in self._encoded([letters], cls=cls)]

    def _batches(self, tokens: Sequence[Letters]) -> Iterator[Sequence[Letters]]:
        """Cut neighbours into batches that padding does not make much larger."""
        batch: list[Letters] = []
        for letters in tokens:
            lengths = [len(other) for other in (*batch, letters)]
            if batch and max(lengths) * len(lengths) > _PADDING * sum(lengths):
                yield batch
                batch = []
            batch.append(letters)
        if batch:
            yield batch

    def _encoded(self, sequences: Sequence[Letters], *, cls: bool = False) -> list[torch.Tensor]:
        """Return the rows of each sequence of one padded batch."""
        assert self._marks or not cls, f"{self._name} has no start token"
        with blaming_encoder(self._name):
            texts = (letters.tobytes().decode("latin-1") for letters in sequences)
            tokens = [torch.as_tensor(self._encoder.tokenize(text)) for text in texts]
            token_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
            length_B = torch.tensor([len(token_T) for token_T in tokens])
            is_token_BT = torch.arange(token_BT.shape[1]) < length_B[:, None]
            token_BT, is_token_BT = token_BT.to(self._device, torch.int64), is_token_BT.to(self._device)
            rows_BLD = self._encoder.forward(self._model, token_BT, is_token_BT, self._layer)
            found = tuple(rows_BLD.shape)
        wanted = len(sequences), self._marks + max(map(len, sequences)), self.dim
        if len(found) != 3 or found[0] != wanted[0] or found[1] < wanted[1] or found[2] != wanted[2]:
            rows = "the start token and the residues" if self._marks else "the residues"
            what = f"forward() of {self._name} gave rows of the shape {found}; {wanted} are {rows} and the width"
            raise JobFailed(what, where="embed.encoder", remedy=_CORRECT)
        first = 0 if cls else self._marks
        return [
            rows_LD[first : self._marks + len(letters)] for rows_LD, letters in zip(rows_BLD, sequences, strict=True)
        ]

    def peak_bytes(self, letters: Letters) -> int:
        """Return the most bytes that live at once while a sequence is encoded; what kernels take within is not seen."""
        from pipeline.memory.tracing.recorder import Recorder  # late: it imports torch's compiler, which takes a second

        recorder = Recorder()
        for tensor in (*self._model.parameters(), *self._model.buffers()):  # views allocate nothing
            recorder.see(tensor)
        recording = recorder.begin()
        with torch.inference_mode(), recorder:
            self._encoded([letters])
        return recording.peak_bytes

    def _measured(self) -> tuple[float, float]:
        """Return the bytes that a residue takes, and that a pair of residues does, from the peaks at two lengths."""
        lengths = sorted({min(length, len(self.typical)) for length in _PROBES})
        shares = [self.peak_bytes(self.typical[:length]) / length for length in lengths]
        if len(shares) == 1:
            return shares[0], 0.0
        of_pair = max(0.0, (shares[1] - shares[0]) / (lengths[1] - lengths[0]))
        return max(float(self.dim), shares[0] - of_pair * lengths[0]), of_pair


def as_letters(text: str) -> Letters:
    """Return a sequence as an array with a number for each residue, so that it can be cut like tokens."""
    return np.frombuffer(text.encode("latin-1"), np.uint8)


_CORRECT = "correct the encoder, then run the same command again"


@contextmanager
def blaming_encoder(name: str) -> Iterator[None]:
    """Turn exceptions of the user's code into an error that says where; an out-of-memory passes through."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
        place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        line = str(error).strip().partition("\n")[0] or "no message"
        what = f"{name} failed with {type(error).__name__}: {line}{place}"
        raise JobFailed(what, where="embed.encoder", remedy=_CORRECT) from error


def _arrays(rows: Sequence[torch.Tensor]) -> list[parity.Rows]:
    return [rows_LD.float().cpu().numpy() for rows_LD in rows]
