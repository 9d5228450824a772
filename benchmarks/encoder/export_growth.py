"""Export the embeddings of 1,000, 10,000 and 100,000 sequences in every format: the memory must not grow with them.

python benchmarks/encoder/export_growth.py [--counts N …] [--formats h5 …] [--out FILE]

Inventories are put into the cache as a scan does, and embeddings of 8 numbers a residue, which are drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.circumstances import write
from benchmarks.scale_parts.apart import apart
from pipeline.config.load import read_config
from pipeline.encoder.embedding_recipe import texts
from pipeline.project.project import Project
from pipeline.records import Item
from pipeline.runs.dataset.worklist import list_items
from pipeline.runs.workflow.embedding_export import WantedExport, export_embeddings
from pipeline.structures.inventory import examine_item, item_key
from pipeline.structures.synthetic import draw_sequence
from pipeline.training.evaluating.embedding_files import FORMATS

REACH_BYTES = 100 << 20
COUNTS = (1_000, 10_000, 100_000)
DIM = 8
CONFIG = "data: {source: fasta, path: data.fasta}\nembed: {weights: esm2_tiny.pt}\n"


def prepare(folder: Path, count: int) -> None:
    """Put the inventory and an embedding of each sequence into the cache."""
    from pipeline.encoder.checkpoints.synth import write_random_checkpoint  # torch: the exports do without

    (folder / "pipeline.yaml").write_text(CONFIG)
    write_random_checkpoint(folder / "esm2_tiny.pt", layers=1, dim=DIM, heads=2)
    random = np.random.default_rng(1)
    with (folder / "data.fasta").open("w") as file:
        for number in range(count):
            file.write(f">s{number}/{number % 7}\n{draw_sequence(random, int(random.integers(10, 30)))}\n")
    project = opened(folder)
    recipe, records = project.encoding.recipe, project.shelves.inventories
    with records.writer() as inventories, project.encoding.shelves.embeddings.writer() as embeddings:
        for item in list_items(project):
            assert isinstance(item, Item)
            found, _ = examine_item(item, {}, project.recipe)
            inventories.put(item_key(item, project.recipe, {}), {}, found.to_json())
            for text in texts(found, recipe.context):
                rows_LD = random.normal(size=(len(text), DIM)).astype(np.float32)
                embeddings.put(recipe.key(text, recipe.wanted(len(text))), {"rows": rows_LD}, {"text": text})


def opened(folder: Path) -> Project:
    """Return the project of a folder."""
    return Project.open(read_config(folder / "pipeline.yaml").config)


def export(folder: Path, format_: str, pool: str) -> int:
    """Export everything; return how many embeddings that were."""
    return export_embeddings(opened(folder), folder / f"out.{format_}", WantedExport(format_, pool, replace=True)).ids


def measure(count: int, formats: list[str]) -> list[dict[str, Any]]:
    """Return what each export took, in a process of its own."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, count)
        for format_ in formats:
            for pool in ("none", "mean"):
                ids, took = apart(export, folder, format_, pool)
                assert ids == count, f"{ids} of {count}"
                size = (folder / f"out.{format_}").stat().st_size
                found.append({"sequences": count, "way": f"{format_} {pool}", "file_bytes": size, **took})
                peak = f"{took['peak_mb']:.0f} MB, {took['peak_mb'] - took['base_mb']:.0f} MB of them its own"
                print(f"{count:7,} {format_:>12} {pool:>5}  {took['seconds']:6.1f} s   peak {peak}", flush=True)
    return found


def main() -> int:
    """Measure all counts and formats; fail where memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for count in options.counts for row in measure(count, options.formats)]
    peaks = {(row["sequences"], row["way"]): row["peak_mb"] for row in rows}
    few, many = min(options.counts), max(options.counts)
    growth = {way: 1e6 * (peaks[many, way] - peaks[few, way]) for count, way in peaks if count == few}
    result = {
        "what": "`pipeline export embeddings` of FASTA sequences, 10 to 29 residues of 8 numbers",
        "exports": rows,
        "growth_bytes": growth,
        "reach_bytes": REACH_BYTES,
    }
    write(options.out, result)
    return 0 if max(growth.values()) <= REACH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
