"""A linear probe: logistic regression on vectors of a frozen model, as CLIP's are judged.

The vectors and classes of training and validation items are predictions (`pipeline submit predict`). The strength of
the regularisation, C as in scikit-learn, is the one with the highest accuracy on the validation items: of every second
power of ten from 10^-6 to 10^6, then nearer and nearer to the best, to an eighth of a power. The probe that is judged
is fitted to both. All vectors are in memory.

Shapes: N items, D features, C classes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from pipeline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOST_STEPS = 1000  # of L-BFGS, as in the original
COARSEST, FINEST = 2.0, 0.125  # steps between powers of ten


def probe_accuracy(folders: Sequence[str], output: str, label: str, vector_ND: Tensor, class_N: Tensor) -> float:
    """Return the accuracy on some items of a probe that is fitted to two folders of predictions: train and val."""
    (train_ND, of_train_N), (val_ND, of_val_N) = (read_vectors(Path(folder), output, label) for folder in folders)
    classes = 1 + int(max(of_train_N.max(), of_val_N.max()))

    @cache
    def validated(power: float) -> float:
        return accuracy(fitted_probe(train_ND, of_train_N, classes, 10**power), val_ND, of_val_N)

    step, best = COARSEST, max(np.arange(-6, 6.1, COARSEST).tolist(), key=validated)
    while step > FINEST:
        step /= 2
        best = max((best, best - step, best + step), key=validated)
    both_ND, of_both_N = torch.cat([train_ND, val_ND]), torch.cat([of_train_N, of_val_N])
    return accuracy(fitted_probe(both_ND, of_both_N, classes, 10**best), vector_ND, class_N)


def fitted_probe(vector_ND: Tensor, class_N: Tensor, classes: int, strength: float) -> Tensor:
    """Return the weights [C, D + 1], the intercepts last, that minimise C · Σ cross entropy + |weights|² / 2."""
    wide = _with_one(vector_ND.double())
    weight = torch.zeros(classes, wide.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight], max_iter=MOST_STEPS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = functional.cross_entropy(wide @ weight.T, class_N)
        total: Tensor = error + weight[:, :-1].square().sum() / (2 * strength * len(class_N))
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach()


def accuracy(weight: Tensor, vector_ND: Tensor, class_N: Tensor) -> float:
    """Return how often the most likely class is the true one."""
    return float(((_with_one(vector_ND.double()) @ weight.T).argmax(1) == class_N).double().mean())


def _with_one(vector_ND: Tensor) -> Tensor:
    return functional.pad(vector_ND, (0, 1), value=1.0)


def read_vectors(folder: Path, output: str, label: str) -> tuple[Tensor, Tensor]:
    """Return an output's vectors of a folder of predictions, and the classes, of the items that have one."""
    vectors, classes = list[torch.Tensor](), list[int]()
    try:
        with (folder / "predictions.jsonl").open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                if row[label] is None or row[label] < 0:
                    continue
                classes.append(row[label])
                if output in row:
                    vectors.append(torch.tensor(row[output]))
                else:
                    with safe_open(folder / row[f"{output}.file"], "pt") as file:
                        vectors.append(file.get_tensor(row["id"]))
        return torch.stack(vectors), torch.tensor(classes)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        problem = f"no predictions with vectors and classes: {error!r}"
        remedy = "pipeline submit predict --set train.predict.split=train --set data.options.label=COLUMN"
        raise DataError(problem, where=str(folder), remedy=remedy) from error
