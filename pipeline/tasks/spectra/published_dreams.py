"""The names of DreaMS' weights: of the pre-trained model, and of the fine-tuned ones with their heads.

A fine-tuned model has the pre-trained one below `backbone.`, and its head below `head.`; the pre-trained one has
neither. Their frequencies stand in a file twice, under two names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.tasks.spectra.peak_transformer import EMBEDDING, PeakSizes
from pipeline.tasks.task_parts import WHERE
from pipeline.training.checkpoints.published_names import renamed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

SIGN, BACKBONE, HEAD = "ff_peak.ff.0.weight", "backbone.", "head."
FREQUENCIES, AGAIN = "fourier_enc.b", "fourier_enc.Fourier frequencies"
APART = 3  # a linear layer of theirs is followed by ReLU and dropout, which are counted, too
PRETRAINING = {"pretraining.mass": "ff_out.ff.0", "pretraining.order": "ro_out"}


@dataclass(frozen=True)
class DreamsNames:
    """The form in which DreaMS publishes weights of these sizes."""

    sizes: PeakSizes

    @property
    def left(self) -> tuple[str, ...]:
        """Theirs that are not needed: outputs of pre-training, where the model has none."""
        theirs = () if self.sizes.classes else tuple(PRETRAINING.values())
        return tuple(f"{before}{name}.*" for before in ("", BACKBONE) for name in theirs)

    @property
    def fresh(self) -> tuple[str, ...]:
        """Ours that may stay as they begin."""
        return ("head.*", "pretraining.*")

    @property
    def names(self) -> dict[str, str]:
        """Our names of the backbone → theirs."""
        layers = range(self.sizes.layers)
        return {
            "embed.peak": "ff_peak.ff.0",
            "embed.masses.frequency_1Q": FREQUENCIES,
            **{f"embed.masses.network.{at}": f"ff_fourier.ff.{APART * at}" for at in range(self.sizes.fourier_layers)},
            "layers.*.attention.weight": "transformer_encoder.atts.*.weights",
            "layers.*.up": "transformer_encoder.ffs.*.in_proj",
            "layers.*.down": "transformer_encoder.ffs.*.out_proj",
            **{f"layers.{at}.before_attention": f"transformer_encoder.scales.{2 * at}" for at in layers},
            **{f"layers.{at}.before_feed": f"transformer_encoder.scales.{2 * at + 1}" for at in layers},
            "norm": f"transformer_encoder.scales.{2 * self.sizes.layers}",
            **(PRETRAINING if self.sizes.classes else {}),
        }

    @property
    def head(self) -> dict[str, str]:
        """Our names of the head → theirs."""
        if self.sizes.summed:
            return {"head.each": "head.phi.0", "head.all": "head.rho"}
        if self.sizes.head == EMBEDDING:
            return {"head.steps.0": "head"}
        return {f"head.steps.{at}": f"head.ff.{APART * at}" for at in range(self.sizes.head_depth)}

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are DreaMS'."""
        return SIGN in names or BACKBONE + SIGN in names

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors under our names."""
        self._refuse_mended("read")
        backbone, head = ({theirs: ours for ours, theirs in names.items()} for names in (self.names, self.head))
        bare = {name.removeprefix(BACKBONE): tensor for name, tensor in tensors.items()}
        return {
            renamed(name, head if name.startswith(HEAD) else backbone): tensor
            for name, tensor in bare.items()
            if name != AGAIN
        }

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's tensors under their names: all of a fine-tuned one, or without a head a pre-trained one."""
        self._refuse_mended("written")
        before = BACKBONE if any(name.startswith(HEAD) for name in tensors) else ""
        of_head = {name: tensor for name, tensor in tensors.items() if name.startswith(HEAD)}
        rest = {renamed(name, self.names): tensor for name, tensor in tensors.items() if name not in of_head}
        rest[AGAIN] = rest[FREQUENCIES]
        heads = {renamed(name, self.head): tensor for name, tensor in of_head.items()}
        return {before + name: tensor for name, tensor in rest.items()} | heads

    def _refuse_mended(self, what: str) -> None:
        """Refuse weights of a network that does not behave as theirs."""
        if not self.sizes.as_published:
            problem = f"weights of DreaMS cannot be {what}: they mean something only where the network has its oddities"
            remedy = "--set train.options.as_published=true"
            raise ConfigError(problem, where=f"{WHERE}.as_published", remedy=remedy)
