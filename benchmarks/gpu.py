"""A day on a GPU in one command: what only a GPU can tell, in order of worth, within so many minutes.

    python benchmarks/gpu.py --minutes 120 [--out FOLDER] [--only smoke,embed,memory,train]
    python benchmarks/gpu.py --rehearse --device simcard     # toy sizes on the simulated GPU of the tests

Parts: smoke (every recipe is trained, evaluated and predicts), embed (speed and parity of the 650M model against
fair-esm and Hugging Face), memory (reserved bytes of steps, planned and measured), train (speed of a training as
planned, and with the settings that guides recommend).

Each case is a process of its own with a time limit: a crash or a hang costs only that case. FOLDER/results.json has
every result as soon as it is known, FOLDER/logs what failed, FOLDER/README.md the page of the day. Run the command
again, and it does what is missing or failed. It needs no network and no root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import CASE, answer, isolated, machine, pipeline
from pipeline.device.kinds import VISIBLE, VISIBLE_TO
from pipeline.memory.hardware.caching_allocator import VARIABLES, allocator_settings
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    import torch

    from pipeline.memory.hardware.gpus import Device

Given = Mapping[str, Any]
Found = dict[str, Any]
Line = tuple[str, str, str, bool]  # of the page: what, the figure to reach, what was measured, whether it reached it
SIMULATED, REHEARSED_MINUTES, LEAST_S = "simcard", 60.0, 5.0
ABOUT = ("device", "card", "driver", "torch", "rehearsal")  # results of another of these are not mixed with these
RECIPES: dict[str, dict[str, int]] = {  # a typical item of each; a tenth of it in a rehearsal
    "complex_docking": {"nodes": 425, "pairs": 45000},
    "rna_ligand": {"atoms": 600, "bonds": 1300, "angles": 900, "dihedrals": 1300, "near": 9000},
    "spectra_finetune": {"peaks": 100},
    "denovo_recursive": {"peaks": 100, "residues": 30},
    "contrastive_pair": {"left": 256, "right": 256},
}
REHEARSED = ("spectra_finetune", "mlp", "transformer_pre")  # models of a rehearsal
FIRST, PROBED, FAIR_ESM, HUGGING_FACE, COSINE = 0.08, 0.02, 8.0, 1.5, 0.999
STEPS, MICROS = 4, 2  # as a probe runs them: the first step makes the optimizer's state
SHARES = {"first": 0.2, "probe": 0.5}  # of the GPU that the two sizes of micro-batches fill
FULL = {"shape": (33, 1280, 20), "sequences": 2000, "lengths": (300, 2000), "rounds": 5}  # layers, width, heads
TOYS = {"shape": (2, 64, 4), "sequences": 12, "lengths": (30, 60), "rounds": 1}
TOY_BYTES = {"first": 4 << 20, "probe": 8 << 20}


# ---- cases, each in a process of its own, and what is known of them ----


def environment(given: Given, allocator: str, *, on_card: bool) -> dict[str, str]:
    """Return the environment of a case: with these settings of the allocator, and without a GPU if it needs none."""
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    variables |= allocator_settings(allocator, variables)
    if given.get("device") == SIMULATED and on_card:
        from tests.card import card

        variables |= card.environment(card.Cards()) | {VISIBLE: "0"}
    return variables if on_card else variables | dict.fromkeys(VISIBLE_TO, "")


class TimeIsOver(Exception):
    """There is no time left for another case."""


@dataclass
class Day:
    """What is known so far, and until when there is time."""

    folder: Path
    scratch: Path
    about: Given  # the GPU, and whether this is a rehearsal
    until: float  # by the monotonic clock, for the part that runs

    def __post_init__(self) -> None:
        self.path = self.folder / "results.json"
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.results: dict[str, Found] = kept.get("cases", {})
        self.others = kept and {name: kept.get(name) for name in ABOUT} != {name: self.about[name] for name in ABOUT}
        self.left_out: list[str] = []

    @property
    def rehearsal(self) -> bool:
        return bool(self.about["rehearsal"])

    def known(self, name: str) -> bool:
        """Tell whether a case was measured."""
        return "error" not in self.results.get(name, {"error": "not measured"})

    def ask(
        self, name: str, case: str, limit_s: float, *, allocator: str = "", on_card: bool = True, **given: Any
    ) -> Found:
        """Return what a case found, now or before; keep it."""
        if self.known(name):
            return self.results[name]
        left_s = self.until - time.monotonic()
        if left_s < LEAST_S:
            self.left_out.append(name)
            raise TimeIsOver
        limit_s = min(left_s, limit_s * (5 if self.rehearsal else 1))  # a simulated GPU is slow
        given = {"device": self.about["device"], "about": dict(self.about), **given}
        begun, log = time.monotonic(), self.folder / "logs" / f"{name.replace(' ', '-')}.log"
        found = isolated(__file__, case, given, limit_s, log, environment(given, allocator, on_card=on_card))
        self.results[name] = {**found, "took_s": round(time.monotonic() - begun, 1)}
        self.write()
        print(f"  {name}: {found.get('error') or 'done'} ({self.results[name]['took_s']} s)", flush=True)
        return self.results[name]

    def write(self) -> None:
        """Write all that is known, aside first."""
        about = {name: self.about[name] for name in ABOUT}
        whole = {**about, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "cases": self.results}
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(whole, indent=1) + "\n")
        aside.replace(self.path)


# ---- the GPU ----


def facts(asked: Given) -> Found:
    """Return what the GPU says of itself; without one, why there is none."""
    from pipeline.device.accelerator import Card, card_here, torch_sees
    from pipeline.memory.history import torch_version
    from pipeline.memory.runtime.meters import StepGauge

    kind = card_here()
    if kind is None or asked["device"] not in ("auto", kind):
        return {"error": f"no GPU here: asked for {asked['device']}, and torch sees {kind or 'none'} ({torch_sees()})"}
    card, start = Card(kind), StepGauge(kind).before
    found = {"torch": torch_version(), "driver": start.driver, "device": kind, "card": card.name}
    return found | {"capability": card.capability, "total_bytes": card.total_bytes}


def described(about: Given) -> Device:
    """Return the GPU as plans know it: by its name, else by its memory."""
    from pipeline.errors import ConfigError
    from pipeline.memory.hardware.gpus import device

    try:
        return device(about["card"])
    except ConfigError:
        return device(f"{about['total_bytes'] >> 20}MiB")


def settings_of_gpu(about: Given) -> list[str]:
    """Return the settings with which stages run on this GPU, without a cluster."""
    card = f"cluster.slurm.cards=[{{gres: here, mem: {about['total_bytes'] >> 20}MiB}}]"
    stages = ("embed", "train", "evaluate", "predict")
    return [word for one in (card, *(f"cluster.{stage}.gpus=1" for stage in stages)) for word in ("--set", one)]


def typed(folder: Path, *words: str) -> None:
    """Type a command; raise with its last words where it fails."""
    done = subprocess.run(pipeline(*words), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise RuntimeError(f"{words[:3]}: exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}")


# ---- smoke: every recipe, by the commands that people type ----


def smoke(given: Given) -> Found:
    """Train a small recipe for two epochs, evaluate it, and write its predictions."""
    from tests.recipes.projects import ALL, write

    recipe, folder = ALL[given["recipe"]], Path(given["folder"])
    folder.mkdir(parents=True)
    write(recipe, folder)
    sets = [*recipe.sets(f"train.precision={given['precision']}", gpus=1), *settings_of_gpu(given["about"])]
    for stage in ("all", "predict"):
        typed(folder, "submit", "--stage", stage, "--follow", "--executor", "local", *sets)
    (model,) = folder.glob("models/*")
    epochs = [json.loads(line) for line in (model / "epochs.jsonl").read_text().splitlines()]
    assert len(epochs) == 2, epochs
    assert all(math.isfinite(term) for epoch in epochs for term in epoch["loss"].values()), epochs
    (predictions,) = folder.glob("predictions/*/predictions.json")
    assert json.loads(predictions.read_text())["items"] > 0, predictions
    return {"reserved_bytes": max(epoch["reserved_bytes"] for epoch in epochs)}


def run_smoke(day: Day) -> None:
    """Run every recipe in two precisions, then in a third."""
    wanted = [(name, kind) for kind in ("fp32", "bf16", "fp16") for name in RECIPES]
    for number, (name, kind) in enumerate(wanted[:1] if day.rehearsal else wanted):
        folder = day.scratch / f"smoke-{number}-{time.monotonic_ns()}"
        day.ask(f"smoke {name} {kind}", "smoke", 420.0, recipe=name, precision=kind, folder=str(folder))


def smoke_rows(results: Mapping[str, Found]) -> Iterator[Line]:
    runs = [found for name, found in results.items() if name.startswith("smoke ")]
    broken = sum("error" in found for found in runs)
    if runs:
        yield f"recipes that do not train, evaluate and predict, of {len(runs)}", "0", f"{broken}", not broken


# ---- embed: speed and parity of the 650M model ----


def side_of(given: Given) -> Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]:
    """Return a way to embed."""
    from benchmarks.embed import fair_esm, hugging_face, packed

    path, device = Path(given["weights"]), given["device"]
    if given["side"] == "fair_esm fp32":
        return fair_esm(path, device)
    if given["side"] == "hugging_face fp16":
        return hugging_face(path.with_name("hugging_face"), device, "float16")
    return packed(path, device, given["side"].rpartition(" ")[2])


def embedded(given: Given) -> Found:
    """Time a side until every row is in the host's memory; compare with fair-esm in fp32."""
    import torch

    from benchmarks.embed import draw
    from pipeline.device.accelerator import Card

    card, side = Card(given["device"]), side_of(given)
    sequences, took_s = draw(given["sequences"], *given["lengths"]), list[float]()
    for _ in range(1 + given["rounds"]):  # the first chooses kernels and allocates
        begun = time.perf_counter()
        for _ in side(sequences):
            pass
        card.synchronize()
        took_s.append(time.perf_counter() - begun)
    residues = sum(map(len, sequences))
    rate, (layers, dim, _) = residues / statistics.median(took_s[1:]), given["shape"]
    found = {"residues_per_s": rate, "tflops": 24.0 * dim**2 * layers * rate / 1e12}
    if given["side"] != "fair_esm fp32":
        some = sequences[:: max(1, len(sequences) // 100)]
        wanted = dict(side_of({**given, "side": "fair_esm fp32"})(some))
        pairs = ((rows.flatten().double(), wanted[text].flatten().double()) for text, rows in side(some))
        found["cosine"] = min(float(torch.nn.functional.cosine_similarity(*pair, dim=0)) for pair in pairs)
    return found


def products(given: Given) -> Found:
    """Return the GPU's rate of large matrix products in half precision."""
    import torch

    from pipeline.device.accelerator import Card

    took_s, square = list[float](), torch.randn(given["width"], given["width"], device=given["device"]).half()
    for _ in range(20):
        Card(given["device"]).synchronize()
        begun = time.perf_counter()
        square @ square
        Card(given["device"]).synchronize()
        took_s.append(time.perf_counter() - begun)
    return {"tflops": 2 * given["width"] ** 3 / min(took_s) / 1e12}


def weights(given: Given) -> Found:
    """Write random weights in both forms."""
    from benchmarks.embed import convert
    from pipeline.encoder.synth import write_random_checkpoint

    path = Path(given["weights"])
    write_random_checkpoint(path, *given["shape"])
    convert(str(path), str(path.with_name("hugging_face")))
    return {}


def run_embed(day: Day) -> None:
    """Measure the sides one after another."""
    sides = ("ours fp16", "fair_esm fp32", "hugging_face fp16", "ours fp32")
    if all(map(day.known, ("products", *(f"embed {side}" for side in sides)))):
        return
    path = day.scratch / "esm2_random.pt"
    day.ask("products", "products", 240.0, width=128 if day.rehearsal else 8192)
    day.results.pop("weights", None)  # another day's folder is gone
    given = {**(TOYS if day.rehearsal else FULL), "weights": str(path)}
    if "error" in day.ask("weights", "weights", 400.0, on_card=False, **given):
        return
    for side in sides:
        day.ask(f"embed {side}", "embedded", 400.0, side=side, **given)


def embed_rows(results: Mapping[str, Found]) -> Iterator[Line]:
    rates = {name.removeprefix("embed "): found for name, found in results.items() if "residues_per_s" in found}
    ours = rates.get("ours fp16")
    for name, reach in (("fair_esm fp32", FAIR_ESM), ("hugging_face fp16", HUGGING_FACE)):
        if ours and name in rates:
            ratio = ours["residues_per_s"] / rates[name]["residues_per_s"]
            yield f"embed 650M in fp16, against {name}", f"≥ {reach}×", f"{ratio:.2f}×", ratio >= reach
    for name in {"ours fp16", "ours fp32"} & set(rates):
        cosine = rates[name].get("cosine", 0.0)
        yield f"{name}: lowest cosine of a sequence", f"≥ {COSINE}", f"{cosine:.6f}", cosine >= COSINE
    if ours and "tflops" in results.get("products", {}):
        share = ours["tflops"] / results["products"]["tflops"]
        yield "embed 650M in fp16, of the rate of matrix products", "", f"{share:.0%}", True


# ---- memory: reserved bytes of steps, planned and measured ----


@dataclass(frozen=True)
class Model:
    """A family of the zoo, or a recipe, as it is trained on a GPU."""

    work: Any
    padded: bool
    sizes: Mapping[str, int]  # of a micro-batch that can be traced and grown
    most: int | None = None  # items at once, of a loss that compares those of a step


def model_of(given: Given) -> Model:
    """Return the model that a case names."""
    from pipeline.device.kinds import CARD

    name, is_small = given["model"], given["about"]["rehearsal"]
    if name not in RECIPES:
        from tests.memory.planning.planned import work_of
        from tests.zoo import ZOO

        member = ZOO[name]
        sizes = min(member.sizes, key=lambda one: one[ITEMS])
        return Model(replace(work_of(member), device=CARD), member.padded, sizes)
    from pipeline.planning.training_work import Work, step_settings
    from pipeline.project.run_code import load_task
    from tests.recipes.projects import ALL, config_of

    config = config_of(ALL[name], *(ALL[name].small if is_small else ()))
    task = load_task(config.train.task, config.train.options)
    work = Work(task, step_settings(config.train, CARD, task), CARD)
    most = config.train.effective_batch // MICROS if work.is_contrastive else None
    item = {size: count // 10 if is_small else count for size, count in RECIPES[name].items()}
    return Model(work, config.train.batching == "padded", {ITEMS: 1, **item}, most=most)


def planned(given: Given) -> Found:
    """Plan bytes of a model's two sizes, each grown until it fills its share of the GPU."""
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.memory.planning.step_estimates import SETTINGS, reserve
    from pipeline.planning.training_work import target_of

    model, about, choice = model_of(given), given["about"], MemoryChoice(precision=given["precision"])
    target = target_of(tuple(about["capability"]) if about["capability"] else None)
    oracle = model.work.oracle(model.sizes, target, padded=model.padded)

    def of(times: int, allowed: Sequence[Any]) -> Found:
        sizes = {name: size * (times if name == ITEMS or not model.padded else 1) for name, size in model.sizes.items()}
        micro = oracle.micro(choice, sizes)
        held = reserve(oracle.standing(choice), [[micro] * MICROS] * STEPS, allowed)
        return {"sizes": sizes, "bytes": held.bytes, "allocator": held.settings, "origin": micro.origin.value}

    def filling(target_bytes: int, allowed: Sequence[Any]) -> Found:
        low, times, found = of(1, allowed), model.most or 8, Found()
        for _ in range(1 if model.most else 3):  # what is reserved is nearly linear in the items
            found = of(times, allowed)
            slope = max(1.0, (found["bytes"] - low["bytes"]) / max(1, times - 1))
            if model.most or 0.9 * target_bytes <= found["bytes"] <= target_bytes:
                return found
            times = max(2, int(1 + (0.96 * target_bytes - low["bytes"]) / slope))
        return found if found["bytes"] <= target_bytes else low

    first = filling(given["targets"]["first"], SETTINGS)
    alike = [one for one in SETTINGS if one == first["allocator"]]  # a process has one of them
    card, is_toy = described(about), about["device"] == SIMULATED
    beside, context = (0, 0) if is_toy else (card.workspace_bytes, card.context_bytes)
    sizes = {"first": first, "probe": filling(given["targets"]["probe"], alike)}
    return {"sizes": sizes, "beside_bytes": beside, "context_bytes": context}


def measured(given: Given) -> Found:
    """Run steps of each size, the smaller first, and read what the GPU reserved."""
    import torch

    from pipeline.device.accelerator import Card
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.memory.runtime.meters import StepGauge

    card, gauge, found = Card(given["device"]), StepGauge(given["device"]), Found()
    for size, sizes in given["sizes"].items():
        torch.manual_seed(0)
        model, died, took_s = model_of(given), "", list[float]()
        batch = model.work.example(sizes)
        try:
            step = model.work.step(MemoryChoice(precision=given["precision"]), device=given["device"])
            for _ in range(STEPS):
                begun = time.perf_counter()
                step.run([batch] * MICROS)
                card.synchronize()
                took_s.append(time.perf_counter() - begun)
        except torch.OutOfMemoryError as error:
            died = str(error).partition("\n")[0]
        reading = gauge.read()
        found[size] = {"reserved_bytes": reading.bytes, "outside_bytes": reading.outside_bytes, "died": died}
        found[size]["step_s"] = statistics.median(took_s[1:]) if len(took_s) > 1 else None
        step = None
        card.empty_cache()
    return found


def run_memory(day: Day) -> None:
    """Plan and measure the breadth of models, then further precisions."""
    from pipeline.memory.planning.memory_plan import CardSpec
    from tests.zoo import ZOO

    budget = CardSpec.of(described(day.about), 1).budget_bytes
    targets = TOY_BYTES if day.rehearsal else {size: int(share * budget) for size, share in SHARES.items()}
    names, precisions = (REHEARSED, ("bf16",)) if day.rehearsal else ((*RECIPES, *ZOO), ("bf16", "fp32", "fp16"))
    for precision in precisions:
        for name in names:
            label, given = f"memory {name} {precision}", {"model": name, "precision": precision}
            if day.known(f"{label} measured"):
                continue
            plan = day.ask(f"{label} planned", "planned", 480.0, on_card=False, targets=targets, **given)
            if "error" not in plan:
                sizes, allocator = plan["sizes"], plan["sizes"]["first"]["allocator"]
                given["sizes"] = {size: row["sizes"] for size, row in sizes.items()}
                day.ask(f"{label} measured", "measured", 120.0, allocator=allocator, **given)


def errors_of(results: Mapping[str, Found]) -> dict[str, Found]:
    """Return by how much each model's plan is off: at first contact, and corrected by a probe."""
    errors = {}
    for name, plan in results.items():
        found = results.get(f"{name.removesuffix(' planned')} measured", {"error": ""})
        if not name.endswith(" planned") or "error" in plan or "error" in found:
            continue
        row, fixed = Found(), plan["beside_bytes"] + plan["context_bytes"]
        first, probe = ({**plan["sizes"][size], **found[size]} for size in SHARES)
        row["died"] = sum(bool(size["died"]) for size in (first, probe))
        row["origin"], row["step_s"] = first["origin"], first["step_s"]
        real = first["reserved_bytes"] + first["outside_bytes"]
        if not first["died"]:
            row["first"] = (first["bytes"] + fixed) / real - 1
        if not row["died"]:  # as plans correct themselves
            ratio = probe["reserved_bytes"] / (probe["bytes"] + plan["beside_bytes"])
            row["probed"] = (ratio * (first["bytes"] + plan["beside_bytes"]) + probe["outside_bytes"]) / real - 1
        errors[name.removesuffix(" planned").removeprefix("memory ")] = row
    return errors


def memory_rows(results: Mapping[str, Found]) -> Iterator[Line]:
    errors = errors_of(results)
    for what, name, reach in (("at first contact", "first", FIRST), ("after one probe", "probed", PROBED)):
        if off := [abs(row[name]) for row in errors.values() if name in row]:
            worst = max(off)
            yield f"reserved memory {what}, worst of {len(off)}", f"≤ {reach:.0%}", f"{worst:.2%}", worst <= reach
    if errors:
        died = sum(row["died"] for row in errors.values())
        yield f"planned steps out of memory, of {len(errors)} models", "0", f"{died}", not died


# ---- train: a training as planned, and with the settings of guides ----


def trained(given: Given) -> Found:
    """Train by the command; return how fast the last epoch was."""
    folder, about = Path(given["folder"]), given["about"]
    if not folder.exists():
        from benchmarks.training import make_project

        make_project(folder, given["complexes"])
    sets = [f"train.epochs={given['epochs']}", "train.precision=auto", *given["sets"]]
    words = [word for one in sets for word in ("--set", one)]
    before = set(folder.glob("models/*"))
    typed(folder, "submit", "--stage", "train", "--follow", *words, *settings_of_gpu(about))
    (model,) = set(folder.glob("models/*")) - before
    epochs = [json.loads(line) for line in (model / "epochs.jsonl").read_text().splitlines()]
    reserved = [epoch["reserved_bytes"] for epoch in epochs]
    return {
        "items_per_s": epochs[-1]["items"] / epochs[-1]["wall_s"], "ooms": sum(epoch["ooms"] for epoch in epochs),
        "reserved_bytes": reserved, "grown": reserved[-1] / reserved[len(reserved) // 3],
    }  # fmt: skip


def run_train(day: Day) -> None:
    """Let our settings and the guides' take turns."""
    complexes, rounds = (8, 1) if day.rehearsal else (400, 3)
    ways = {"planned": [], "guides": ["train.empty_cache_every=1"]}
    for number in range(rounds):
        for name, sets in ways.items():
            seed = f"train.seed={2 * number + (name == 'guides')}"  # so that each is a training of its own
            given = {"complexes": complexes, "epochs": 3 if day.rehearsal else 6, "sets": [*sets, seed]}
            day.ask(f"train {name} {number}", "trained", 600.0, folder=str(day.scratch / "train"), **given)


def train_rows(results: Mapping[str, Found]) -> Iterator[Line]:
    runs = {name: found for name, found in results.items() if "items_per_s" in found}
    ours = [name for name in runs if "planned" in name and name.replace("planned", "guides") in runs]
    ratios = [runs[name]["items_per_s"] / runs[name.replace("planned", "guides")]["items_per_s"] for name in ours]
    if ratios:
        ratio, grown = statistics.median(ratios), max(found["grown"] for found in runs.values())
        yield "training, against emptying the cache after each micro-batch", "≥ 1×", f"{ratio:.2f}×", ratio >= 1
        yield "reserved memory at the end over that after a third", "≤ 1.02×", f"{grown:.3f}×", grown <= 1.02


# ---- the day ----


@dataclass(frozen=True)
class Part:
    """A part of the day."""

    what: str
    share: float  # of the whole time
    run: Callable[[Day], None]
    rows: Callable[[Mapping[str, Found]], Iterator[Line]]


PARTS = {
    "smoke": Part("every recipe trained, evaluated and predicted with", 0.25, run_smoke, smoke_rows),
    "embed": Part("speed and parity of the 650M model", 0.2, run_embed, embed_rows),
    "memory": Part("reserved memory of steps, planned and measured", 0.4, run_memory, memory_rows),
    "train": Part("speed of a training", 0.15, run_train, train_rows),
}
CASES: dict[str, Callable[[Given], Found]] = {
    "facts": facts, "smoke": smoke, "embedded": embedded, "products": products, "weights": weights,
    "planned": planned, "measured": measured, "trained": trained,
}  # fmt: skip


def page(day: Day) -> str:
    """Return the page of the day."""
    about, errors = day.about, errors_of(day.results)
    today = f"{datetime.now(UTC):%Y-%m-%d}; driver {about['driver'] or '?'}; torch {about['torch']}; {machine()}"
    toys = "**This is a rehearsal at toy sizes. No figure below is a GPU's.**\n\n" if day.rehearsal else ""
    lines = [f"# A day on {about['card']}\n\n{toys}{today}\n", "| figure | reach | measured | |", "|---|---|---|---|"]
    rows = [row for part in PARTS.values() for row in part.rows(day.results)]
    lines += [f"| {what} | {reach} | {value} | {'✓' if reached else '✗'} |" for what, reach, value, reached in rows]
    missing = [f"- {name}: {found['error']}" for name, found in day.results.items() if "error" in found]
    missing += [f"- {name}: there was no time; run the command again" for name in day.left_out]
    lines += ["", "## What is missing", "", *(missing or ["Nothing."])]
    lines += ["", "| memory of | at first | after a probe | a step, s | origin |", "|---|---|---|---|---|"]
    for name, row in sorted(errors.items()):
        cells = [f"{row[kind]:+.2%}" if kind in row else "out of memory" for kind in ("first", "probed")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['step_s'] or 0:.3g} | {row['origin']} |")
    return "\n".join(lines) + "\n"


def run_parts(day: Day, names: Sequence[str], end: float) -> None:
    """Give each part its share of the time, and what the parts before it have left."""
    begun, shares, given = time.monotonic(), sum(PARTS[name].share for name in names), 0.0
    for name in names:
        given += PARTS[name].share / shares
        day.until = begun + given * (end - begun)
        print(f"{name}: {PARTS[name].what}", flush=True)
        with suppress(TimeIsOver):
            PARTS[name].run(day)


def main() -> int:
    """Run the day; fail where there is no GPU, or where anything did."""
    if sys.argv[1:] == [CASE]:
        answer(CASES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help=f"for all of it (a rehearsal: {REHEARSED_MINUTES:g})")
    parser.add_argument("--device", default="auto", help="auto, or a type of torch's: cuda, xpu, …")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes")
    parser.add_argument("--out", type=Path, help="folder of the results (default: gpu-day)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas (default: all)")
    given = parser.parse_args()
    if given.minutes is None and not given.rehearse:
        parser.error("--minutes N: how long may all of it take?")
    names = given.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    (folder := (given.out or Path("gpu-day")).absolute()).mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * (given.minutes or REHEARSED_MINUTES)
    asked = {"device": given.device}
    about = isolated(__file__, "facts", asked, 300.0, folder / "logs/facts.log", environment(asked, "", on_card=True))
    if "error" in about:
        sys.exit(f"{about['error']}: nothing was measured (--rehearse --device {SIMULATED} shows that everything runs)")
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as scratch:
        day = Day(folder, Path(scratch), {**about, "rehearsal": given.rehearse}, end)
        if day.others:
            sys.exit(f"{day.path} is of another GPU or version of torch: --out another folder")
        try:
            run_parts(day, names, end)
        finally:
            (folder / "README.md").write_text(page(day))
            print(f"{folder / 'README.md'} is written", flush=True)
    return 1 if any("error" in found for found in day.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
