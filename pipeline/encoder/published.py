"""The ESM-2 models that Meta published: what they are, where they are, and what their files must hash to."""

from __future__ import annotations

from dataclasses import dataclass

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
