"""Encoders of Hugging Face's library, by the protocol that encoders of users follow: ProtT5, Ankh, SaProt and others.

`embed: {encoder: "pipeline.encoder.engine.hugging_face:HuggingFace", weights: FOLDER}`. Nothing here imports their
library, nor torch, before there is something to encode.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.command_line import install_extra
from pipeline.encoder.checkpoints.checkpoint_files import CONFIG, read_json_object
from pipeline.errors import ConfigError, JobFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

_T5 = ("t5", "mt5", "umt5")  # of which the encoder alone is wanted
_INSTALL = install_extra("transformers")


class HuggingFace:
    """A model of theirs in a local folder, with its own tokenizer.

    `residue` is how a residue is written for that: "{} " for ProtT5, "{}" for Ankh and ESM, "{}#" for SaProt, whose
    second letter is a residue's structure, and # says that it is not known.
    """

    version = 1

    def __init__(
        self, weights: Path, residue: str = "{}", letters: str = "ACDEFGHIKLMNPQRSTVWYX", longest: int = 0
    ) -> None:
        if "{}" not in residue:
            what = f"residue is {residue!r}: it says with {{}} where the letter stands, such as '{{}}#'"
            raise ConfigError(what, where="embed.options.residue", remedy="pipeline config check")
        self._folder, self._residue, self.letters, self.longest = weights, residue, letters, longest

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

    def model(self) -> nn.Module:
        """Return the encoder, from safetensors: nothing that is read is executed."""
        library = _library()
        kind = library.T5EncoderModel if self._config.get("model_type") in _T5 else library.AutoModel
        more = {"add_pooling_layer": False} if self._config.get("model_type") == "esm" else {}
        model: nn.Module = kind.from_pretrained(self._folder, local_files_only=True, use_safetensors=True, **more)
        return model

    def tokenize(self, sequence: str) -> Sequence[int]:
        """Return the tokens that their tokenizer makes of a sequence, one for each residue and its marks."""
        text = "".join(self._residue.format(letter) for letter in sequence)
        coded = self._tokenizer(text, return_special_tokens_mask=True)
        tokens: list[int] = coded["input_ids"]
        known = [number for number, mark in enumerate(coded["special_tokens_mask"]) if not mark]
        if known != list(range(self._marks, self._marks + len(sequence))) or self._unknown in tokens:
            what = (
                f"the tokenizer gives {len(known)} tokens for {len(sequence)} residues, or does not know some of them"
            )
            remedy = "--set embed.options.residue=…, as the model's card writes sequences, or embed.options.letters"
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
            remedy = "put all files of the model's page there, those of its tokenizer, too"
            raise ConfigError(what, where=str(self._folder), remedy=remedy) from error

    @cached_property
    def _marks(self) -> int:
        """The marks that stand before a sequence."""
        coded = self._tokenizer(self._residue.format(self.letters[0]), return_special_tokens_mask=True)
        mask: list[int] = coded["special_tokens_mask"]
        return mask.index(0) if 0 in mask else 0

    @cached_property
    def _unknown(self) -> int | None:
        number: int | None = self._tokenizer.unk_token_id
        return number


def _library() -> Any:
    """Return their library; say how to install it where it is not."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        what = "the package transformers is not installed, which this encoder needs"
        raise ConfigError(what, where="embed.encoder", remedy=_INSTALL) from None
    return transformers
