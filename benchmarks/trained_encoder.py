"""A trained encoder against a random one of the same architecture, on held-out antibodies, by a sweep of the project.

    python benchmarks/trained_encoder.py [--rounds 3] [--epochs 30] [--save]

AntiBERTy's weights and the structures come from public packages; each is downloaded once. The task is the interface of
the heavy and the light variable domain. Antibodies with a domain that is 90% equal stay together, in one of four folds;
each fold is held out once. A round is a seed, of the training and of the random encoder.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Row, Spread, options, pipeline, publish, run, say
from tests.real.antibodies import ARMS, FOLDS, METRIC, NAMES, results, write_points, write_project

NOT_BETTER = "Not better: the interface has nearly the same residues in every antibody, and 12 are few."


def main() -> int:
    """Train each arm with each seed on each fold; compare the means over all folds, seed by seed."""
    typed = options(str(__doc__), 3, epochs={"type": int, "default": 30})
    with TemporaryDirectory(prefix="trained-encoder.") as made:
        folder = Path(made)
        write_project(folder, typed.rounds, typed.epochs)
        run(pipeline("submit", "scan", "--follow", "--set", "data.splits=null"), folder)
        split = ("--by", "clusters", "--clusters", "clusters.tsv", "--folds", FOLDS, "--out", "cv.csv")
        run(pipeline("data", "split", *split, "--set", "data.splits=null"), folder)
        figures: dict[tuple[str, int], list[float]] = defaultdict(list)
        for fold in range(FOLDS):
            points = write_points(folder, fold, typed.rounds)
            run(pipeline("submit", "train", "--sweep-file", points, "--follow"), folder)
            for point, value in results(run(pipeline("compare", "--json"), folder).out).items():
                figures[point].append(value)
            (folder / "models").rename(folder / f"models{fold}")
            say(f"fold {fold}: {dict(figures)}")
    of_arm = {arm: Spread.of([sum(figures[arm, seed]) / FOLDS for seed in range(typed.rounds)]) for arm in ARMS}
    row = Row(
        "trained encoder",
        f"interface of heavy and light chains of {len(NAMES)} antibodies, {FOLDS} folds, {typed.rounds} seeds:"
        f" {METRIC} with a trained encoder (AntiBERTy, 25.5M)",
        "the same architecture with random weights; no embedding",
        "more than both",
        f"{of_arm['trained']:.3f}; {of_arm['random']:.3f}; {of_arm['none']:.3f}",
        "trained_encoder.py",
        "" if of_arm["trained"].low > max(of_arm["random"].high, of_arm["none"].high) else NOT_BETTER,
    )
    return publish([row], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
