"""The linear probe: its fit is scikit-learn's, and evaluation reports its accuracy from two folders of predictions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.pairs.linear_probe import fitted_probe
from tests.tasks.pairs.pictures import CLASSED

# LogisticRegression(C=…, max_iter=5000, tol=1e-12) of scikit-learn 1.9.1: coefficients, then intercepts
REFERENCE = {
    0.1: [[0.40179, -0.07924, -0.14504, -0.47152], [0.12749, 0.38, 0.14748, 0.11261],
          [-0.52928, -0.30075, -0.00244, 0.35891]],
    10.0: [[1.53362, -0.10367, -0.72409, -0.62253], [0.03157, 1.2097, 0.53356, 0.36529],
           [-1.56519, -1.10604, 0.19054, 0.25724]],
}  # fmt: skip


@pytest.mark.parametrize("strength", REFERENCE)
def test_a_fit_is_that_of_scikit_learn(strength):
    rng = np.random.default_rng(0)
    vector_ND = rng.normal(size=(40, 3))
    told_NC = vector_ND @ np.array([[1, 0, -1], [0, 1, 0.5], [-1, -1, 0]]).T + rng.normal(size=(40, 3))
    weight = fitted_probe(torch.from_numpy(vector_ND), torch.from_numpy(told_NC.argmax(1)), 3, strength)
    assert torch.allclose(weight, torch.tensor(REFERENCE[strength], dtype=torch.float64), atol=3e-5)


def vectors(seed, count):
    """Return vectors whose first numbers say their class, and the classes."""
    rng = np.random.default_rng(seed)
    class_N = rng.integers(3, size=count)
    return (np.eye(3, 5)[class_N] + 0.2 * rng.normal(size=(count, 5))).astype(np.float32), class_N


def test_evaluation_adds_the_accuracy_of_a_probe_of_the_items_whose_class_is_known(tmp_path):
    for name, seed in (("train", 0), ("val", 1)):
        (tmp_path / name).mkdir()
        rows = zip(*vectors(seed, 40), strict=True)
        lines = [
            json.dumps({"id": str(at), "left": left.tolist(), "label": int(label)})
            for at, (left, label) in enumerate(rows)
        ]
        (tmp_path / name / "predictions.jsonl").write_text(
            "\n".join([*lines, '{"id": "x", "left": [1], "label": -1}', ""])
        )
    vector_ND, class_N = vectors(2, 30)
    class_N[-1] = -1
    task = replace(CLASSED, linear_probe=str(tmp_path / "train"), linear_probe_val=str(tmp_path / "val"))
    figures = task.metrics({"left": list(vector_ND), "right": list(vector_ND), "label": list(class_N)})
    assert figures["linear_probe"] > 0.95
    with pytest.raises(DataError) as refused:
        replace(task, linear_probe_val=str(tmp_path)).metrics(
            {"left": list(vector_ND), "right": list(vector_ND), "label": class_N}
        )
    assert "split" in refused.value.remedy
    with pytest.raises(ConfigError):
        replace(CLASSED, linear_probe="./train")
