"""GPUs by name: the memory that programs can use, their rates, and what else occupies their memory.

No other file knows names and sizes; `pipeline init` reads them here. All figures are of one GPU as programs see them:
one of an A16's four.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeline.errors import ConfigError
from pipeline.units import GIB, MIB

SizesGib: TypeAlias = tuple[int, ...]

_GIGA, _TERA = 10**9, 10**12

# NCCL's buffers: 0.5 to 0.7 GB seen per group of several GPUs; the most of it is planned for. They are allocated
# as ranks join (`ProcessGroup.warm_up`), before anything of the first step is measured.
COMMUNICATOR_BYTES = 700 * 10**6
# A reserve: lazily loaded kernels, cuDNN's plans, page tables, drivers that keep more.
_RESERVE_SHARE, _LEAST_RESERVE_BYTES = 0.01, 128 * MIB
# Of a size without a name: most cards have up to a sixteenth less than their box says (an A10 a twelfth).
_UNNAMED_RESERVE_SHARE = 1 / 16
# A process that has only started: 287 MB (pytorch#86509, loading lazily, as torch does since 1.13),
# 300-400 MB on a V100 (pytorch#20532), 256 MiB on a 3090 (InvokeAI#9413), 426 MiB on an Ada card (unsloth-zoo#1053),
# 522 MiB on an H100 and 616 MiB on a newer one (LMCache#4019). By generation, rounded up; a profile corrects it.
_CONTEXT_MIB = {3: 350, 6: 350, 7: 400, 8: 450, 9: 550, 10: 640, 12: 640}
# parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, else 2 x 4 MiB
# and 8 x 16 KiB; cuBLASLt has 1 MiB more. Each thread has its own: one runs forward, another backward.
_CUBLAS_BYTES, _CUBLAS_HOPPER_BYTES, _CUBLASLT_BYTES = 8 * MIB + 128 * 1024, 32 * MIB, MIB
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU that plans depend on."""

    name: str
    usable_bytes: int  # torch's "total capacity": all processes and contexts together
    reserve_bytes: int  # kept free for the unknown
    context_bytes: int  # CUDA's own, of each process, outside torch
    capability: tuple[int, int]
    fp32_flops: float  # peak rates per second, dense
    half_flops: float  # fp16, and bf16 where it has it, adding up in fp32
    bandwidth: float  # bytes per second
    notes: tuple[str, ...] = ()  # assumptions

    @property
    def has_fp16(self) -> bool:
        """Return whether fp16 is faster than fp32: with tensor cores, or on a P100."""
        return self.half_flops > self.fp32_flops

    @property
    def has_bf16(self) -> bool:
        """Return whether it computes in bf16; older ones only emulate it."""
        return self.capability >= (8, 0)

    @property
    def workspace_bytes(self) -> int:
        """Return the workspace of cuBLAS during training, which the caching allocator serves."""
        cublas = _CUBLAS_HOPPER_BYTES if self.capability[0] in (9, 10, 12) else _CUBLAS_BYTES
        return _THREADS * (cublas + _CUBLASLT_BYTES)

    @property
    def process_bytes(self) -> int:
        """Return what each process takes outside torch, the unknown included."""
        return self.context_bytes + _LEAST_RESERVE_BYTES

    def budget_bytes(self, ranks: int = 1) -> int:
        """Return how much torch's caching allocator may reserve."""
        communicator_bytes = COMMUNICATOR_BYTES if ranks > 1 else 0
        return max(0, self.usable_bytes - self.context_bytes - self.reserve_bytes - communicator_bytes)


@dataclass(frozen=True, slots=True)
class _Card:
    """A model of GPU; `smi_gib` where nvidia-smi's total in GiB is not that of torch's rounded down."""

    usable_gib: float
    capability: tuple[int, int]
    fp32: float  # TFLOP/s
    half: float
    bandwidth: float  # GB/s
    words: str = ""  # pattern of names that mean this card among others of its model
    smi_gib: int = 0

    @property
    def size_gib(self) -> int:
        return self.smi_gib or int(self.usable_gib)


# Memory: the least "total capacity" that torch's out-of-memory errors report in public threads (139.72, 178.35, 79.10,
# 93.00, 39.38, 31.34, 23.51, 44.34, 47.40, 14.56, 22.03; RTX 6000 Ada: 50865307648 bytes, unsloth-zoo#1053), whole
# numbers nvidia-smi's total, rounded down. Rates: the vendor's data sheets and architecture white papers (fp32, TF32,
# half), dense (half of what they print "with sparsity", marked * here), boost clocks, fp16 adding up in fp32.
_CARDS: dict[str, _Card] = {
    # H100 data sheet (2023): SXM 67/989*/1,979*, 3.35 TB/s; PCIe 51/756*/1,513*, 2 TB/s; NVL 60/835*/1,671*, 3.9 TB/s
    "h100-80gb-pcie": _Card(79.10, (9, 0), 51, 756, 2000, words="pcie"),
    "h100-80gb-sxm": _Card(79.10, (9, 0), 67, 989.4, 3350, words="sxm|hbm3"),
    "h100-94gb-nvl": _Card(93.00, (9, 0), 60, 835.5, 3900, words="nvl"),
    # H200 data sheet: SXM as H100, 4.8 TB/s; NVL 60/835*/1,671*. torch calls the one "NVIDIA H200", the other "… NVL"
    "h200-141gb-nvl": _Card(139.72, (9, 0), 60, 835.5, 4800, words="nvl", smi_gib=140),
    "h200-141gb-sxm": _Card(139.72, (9, 0), 67, 989.4, 4800, words="sxm|hbm3|^nvidia_h200$", smi_gib=140),
    # Blackwell architecture brief, HGX B200 at 1,000 W, of 8: TF32 2.2 PF*, FP16 4.5 PF*; 7.7 TB/s
    "b200-180gb": _Card(178.35, (10, 0), 75, 2250, 7700),
    # A100 data sheet: 19.5/156/312; 40 GB 1,555 GB/s; 80 GB PCIe 1,935, SXM 2,039 GB/s
    "a100-40gb": _Card(39.38, (8, 0), 19.5, 312, 1555),
    "a100-80gb-pcie": _Card(79.10, (8, 0), 19.5, 312, 1935, words="pcie"),
    "a100-80gb-sxm": _Card(79.10, (8, 0), 19.5, 312, 2039, words="sxm"),
    # V100 data sheet: PCIe 14/112, SXM2 15.7/125; 900 GB/s
    "v100-16gb-pcie": _Card(15.77, (7, 0), 14, 112, 900, words="pcie"),
    "v100-16gb-sxm": _Card(15.77, (7, 0), 15.7, 125, 900, words="sxm"),
    "v100-32gb-pcie": _Card(31.74, (7, 0), 14, 112, 900, words="pcie"),
    "v100-32gb-sxm": _Card(31.74, (7, 0), 15.7, 125, 900, words="sxm"),
    # P100 data sheet, PCIe: 9.3/18.7, 549 and 732 GB/s; no tensor cores
    "p100-12gb": _Card(11, (6, 0), 9.3, 18.7, 549),
    "p100-16gb": _Card(15, (6, 0), 9.3, 18.7, 732),
    # Data sheets of A40, A30, A16 (of its four), A10; of A10G AWS's of 2022: 35/35/70
    "a40": _Card(44.34, (8, 6), 37.4, 149.7, 696),
    "a30": _Card(23.50, (8, 0), 10.3, 165, 933),
    "a16": _Card(14, (8, 6), 4.5, 17.9, 200),
    "a10": _Card(22, (8, 6), 31.2, 125, 600),
    "a10g": _Card(22, (8, 6), 35, 70, 600),
    # Data sheets of L40, L40S, L4, T4
    "l40": _Card(44.34, (8, 9), 90.5, 181, 864),
    "l40s": _Card(44.34, (8, 9), 91.6, 362, 864),
    "l4": _Card(22.03, (8, 9), 30.3, 121, 300),
    "t4": _Card(14.56, (7, 5), 8.1, 65, 300),
    # K80 board specification, of its two GPUs; torch has long dropped it
    "k80": _Card(11, (3, 7), 2.8, 0, 240),
    # Data sheets of RTX A6000, A5000; Turing white paper (Quadro RTX 8000 and 6000, RTX 2080 Ti, Titan RTX)
    "rtx-a6000": _Card(47.40, (8, 6), 38.7, 154.8, 768),
    "rtx-a5000": _Card(23, (8, 6), 27.8, 111.1, 768),
    "rtx-8000": _Card(44, (7, 5), 16.3, 130.5, 672),
    "rtx-6000": _Card(22, (7, 5), 16.3, 130.5, 672, words="quadro"),
    "rtx-2080-ti": _Card(10, (7, 5), 13.4, 53.8, 616),
    "titan-rtx": _Card(23, (7, 5), 16.3, 130.5, 672),
    # Ada white paper: RTX 6000 Ada, RTX 5000 Ada, RTX 4090
    "rtx-6000-ada": _Card(47.37, (8, 9), 91.1, 364.2, 960),
    "rtx-5000-ada": _Card(31, (8, 9), 65.3, 261.1, 576),
    "rtx-4090": _Card(23.51, (8, 9), 82.6, 165.2, 1008),
    # RTX Blackwell white paper: RTX PRO 6000 (its server edition), RTX 5090; GA102 white paper: RTX 3090
    "rtx-pro-6000": _Card(94.50, (12, 0), 120, 480, 1597, smi_gib=95),
    "rtx-5090": _Card(31.34, (12, 0), 104.8, 209.5, 1792),
    "rtx-3090": _Card(23.50, (8, 6), 35.6, 71, 936),
    # Pascal white paper
    "gtx-1080-ti": _Card(10, (6, 1), 11.3, 0, 484),
}


def _model(card: str) -> str:
    """Return the name of a card without its size and form."""
    return re.sub(r"-\d+gb.*", "", card)


_MODELS = {model: tuple(card for card in _CARDS if _model(card) == model) for model in map(_model, _CARDS)}
_MODELS["rtx-6000"] += ("rtx-6000-ada",)  # many write only RTX 6000
# Spellings that do not follow from the name of a model.
_SPELLED = {"v100": "v100s?", "rtx-6000": "rtx_?6000", "rtx-8000": "rtx_?8000"}


def _spelling(model: str) -> re.Pattern[str]:
    """Return a pattern of a model's name in a normalised text: rtx_4090, rtx4090 and 4090 are one."""
    name = re.sub(r"^(rtx|gtx)-", r"(?:\1_?)?", model).replace("-", "_?")
    return re.compile(rf"(?<![a-z0-9]){_SPELLED.get(model, name)}(?![0-9])")


_SPELLINGS = [(_spelling(model), _MODELS[model]) for model in sorted(_MODELS, key=len, reverse=True)]  # a10g, then a10
_SLICE = re.compile(r"(?<![a-z0-9])(\d+)g\.(\d+)gb")  # MIG, such as 1g.10gb or a100_3g.20gb
_SIZE = re.compile(r"(?<![0-9])(\d+)_?gi?b?(?![a-z0-9.])")
_BARE_SIZE = re.compile(r"_(\d{2,3})(?![a-z0-9.])")  # as in a100-80
_PLAIN_SIZE = re.compile(r"(\d+(?:\.\d+)?)_?([mgt])(?:i?b)?")  # as elsewhere, units are powers of 1024
_UNIT_BYTES = {"m": MIB, "g": GIB, "t": 1 << 40}
# MIG user guide: how many compute slices make a GPU. Of 132 multiprocessors of an H100 a slice has 16, of 108 of an
# A100 14 (`nvidia-smi mig -lgip`): an eighth, though there are only seven.
_SLICES, _FEWER_SLICES = 8, {"a30": 4, "rtx-pro-6000": 4}
_SLICED = ("a100-40gb", "a100-80gb-pcie", "h100-80gb-pcie", "h200-141gb-nvl", "b200-180gb")
_LARGEST_BYTES = 4 << 40
_WHERE = "--gpu"  # the only place where a user's GPU name must be known


def device(name: str) -> Device:
    """Return the GPU of a name, or of a plain size such as 24GiB; the smallest where a name fits several."""
    name = name.strip()
    text = _plain(name)
    if size := _PLAIN_SIZE.fullmatch(text):
        size_bytes = int(float(size[1]) * _UNIT_BYTES[size[2]])
        if not MIB <= size_bytes <= _LARGEST_BYTES:
            raise ConfigError(f"no GPU has {name}", where=_WHERE, remedy="use a GPU name, or a size such as 24GiB")
        return _unnamed(name, size_bytes)
    model, cards = _model_in(text)
    if model and text[model.end() : model.end() + 1].isalpha():
        raise _unknown(name)  # a10o and 3090ti, for example, are other models
    if mig := _SLICE.search(text):  # it is as fast as its share of the compute slices
        return _part(text, cards or _SLICED, _usable_gib(int(mig[2])), int(mig[1]))
    if not cards:
        raise _unknown(name)
    sizes = sizes_said(text, bare=True)
    if sizes and sizes[-1] < min(_CARDS[card].size_gib for card in cards):
        return _part(text, cards, _usable_gib(sizes[-1]))
    candidates = _meant(text, cards, sizes)
    doubt = f"{name} may be {', '.join(candidates[:-1])} or {candidates[-1]}: assuming the smallest"
    return replace(_named(candidates[0]), notes=(doubt,) if len(candidates) > 1 else ())


def known_name(card: str) -> str:
    """Return the canonical name of a card; unknown ones keep their name."""
    try:
        return device(card).name
    except ConfigError:
        return card


def known_names() -> tuple[str, ...]:
    """Return the names of all GPUs that are known."""
    return tuple(_CARDS)


def names_a_model(text: str) -> bool:
    """Return whether a text contains the name of a GPU."""
    return _model_in(_plain(text))[0] is not None


def sizes_gib(name: str) -> SizesGib:
    """Return how much memory the name of a GPU promises, in whole GiB: one size, those that were sold, or none.

    It is nvidia-smi's total: less than on the box, by ECC and what the driver keeps.
    """
    text = _plain(name)
    if mig := _SLICE.search(text):
        return (_usable_gib(int(mig[2])),)
    sold = tuple(sorted({_CARDS[card].size_gib for card in _model_in(text)[1]}))
    sizes = sizes_said(text)
    if sold and sizes and sizes[-1] < min(sold):  # a part of a GPU, such as h200.35gb
        return (_usable_gib(sizes[-1]),)
    if len(sold) > 1:
        return nearest_sizes(sold, sizes_said(text, bare=True)) or sold
    return sold or tuple(_usable_gib(size) for size in sizes[-1:])


def sizes_said(text: str, *, bare: bool = False) -> list[int]:
    """Return the sizes in GiB that follow or precede a GPU's name; with `bare`, also numbers without a unit."""
    rest = _plain(text)
    if (model := _model_in(rest)[0]) is not None:  # its name may look like a size: a10g
        rest = rest[: model.start()] + rest[model.end() :]
    return [int(size) for size in _SIZE.findall(rest) or (_BARE_SIZE.findall(rest) if bare else [])]


def nearest_sizes(sold: SizesGib, said: list[int]) -> SizesGib:
    """Return the sold sizes that numbers in a name can mean: 80 means 79."""
    return tuple(size for size in sold if any(size <= number <= 1.1 * size + 1 for number in said))


def _plain(name: str) -> str:
    return re.sub(r"[\s-]", "_", name.lower())


def _model_in(text: str) -> tuple[re.Match[str] | None, tuple[str, ...]]:
    """Return where a text names a GPU, and which cards that may mean."""
    return next(((match, cards) for spelling, cards in _SPELLINGS if (match := spelling.search(text))), (None, ()))


def _usable_gib(said_gib: int) -> int:
    """Return the GiB that are surely usable of the size in a name."""
    return max(1, said_gib * 15 // 16)


def _meant(text: str, cards: tuple[str, ...], said: list[int]) -> list[str]:
    """Return the cards that a name can mean, the least first: the smallest, then the slowest."""
    sizes = nearest_sizes(tuple(_CARDS[card].size_gib for card in cards), said)
    candidates = [card for card in cards if not sizes or _CARDS[card].size_gib in sizes]
    worded = [card for card in candidates if _CARDS[card].words and re.search(_CARDS[card].words, text)]
    return sorted(worded or candidates, key=lambda card: (_CARDS[card].usable_gib, *_speed(card)))


def _speed(card: str) -> tuple[float, float]:
    return _CARDS[card].half, _CARDS[card].bandwidth


def _reserve(size: int, share: float = _RESERVE_SHARE) -> int:
    return max(_LEAST_RESERVE_BYTES, int(share * size))


def _named(name: str) -> Device:
    card = _CARDS[name]
    usable = int(card.usable_gib * GIB)
    context = _CONTEXT_MIB[card.capability[0]] * MIB
    rates = (card.fp32 * _TERA, card.half * _TERA, card.bandwidth * _GIGA)
    return Device(name, usable, _reserve(usable), context, card.capability, *rates)


def _part(text: str, cards: tuple[str, ...], usable_gib: int, slices: int = 0) -> Device:
    """Return a slice of a GPU with this much memory and this many compute slices."""
    large = [card for card in cards if _CARDS[card].usable_gib >= usable_gib] or list(cards)
    parent = min(large, key=_speed)
    whole, usable = _named(parent), usable_gib * GIB
    memory = min(1.0, usable / whole.usable_bytes)
    compute = min(1.0, slices / _FEWER_SLICES.get(parent, _SLICES)) if slices else memory
    return replace(
        whole,
        name=text,
        usable_bytes=usable,
        reserve_bytes=_reserve(usable),
        fp32_flops=whole.fp32_flops * compute,
        half_flops=whole.half_flops * compute,
        bandwidth=whole.bandwidth * memory,
        notes=(f"{text} is treated as {compute:.0%} of the rates of {parent}",),
    )


def _unnamed(name: str, size: int) -> Device:
    """Return a GPU known only by its size, with the rates of the slowest one since Ampere that is as large."""
    least = (1 - _UNNAMED_RESERVE_SHARE) * size
    like = [name for name, card in _CARDS.items() if card.capability >= (8, 0) and card.usable_gib * GIB >= least]
    slowest = min(like or ["b200-180gb"], key=_speed)
    return replace(
        _named(slowest),
        name=name,
        usable_bytes=size,
        reserve_bytes=_reserve(size, _UNNAMED_RESERVE_SHARE),
        context_bytes=max(_CONTEXT_MIB.values()) * MIB,
        notes=(
            f"{name} is a size: 1/16 of it is kept free, since GPUs have less memory than advertised",
            f"{name} is assumed to be as fast as {slowest}, and to compute in bf16, as all do since Ampere",
        ),
    )


def _unknown(name: str) -> ConfigError:
    short = {model.replace("-", ""): model for model in _MODELS}
    near = difflib.get_close_matches(_plain(name).replace("_", ""), short, n=4)
    known = f"similar: {', '.join(short[key] for key in near)}" if near else f"known: {', '.join(short.values())}"
    problem = f'unknown GPU "{name}" ({known})'
    return ConfigError(problem, where=_WHERE, remedy="use a known name or its memory, such as 24GiB")
