"""The public interface: what your code may import. Everything else in this package may change between versions.

For tasks, readers and encoders: their protocols, the values that a reader yields, and `breaches`, which tests a task.
`NameTable` has the names of your model's published weights. For your own training loops: `open_loader` with
`SamplerSettings`, `Governed` for plain PyTorch, `GovernorCallback` for Lightning. For notebooks and programs: `submit`,
`status`, `wait`, `cancel`, `predict`, and `predictions`, which reads their results. Importing this module does not
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from pipeline.dataset.loading import open_loader
    from pipeline.engine.from_python import cancel, predict, predictions, status, submit, wait
    from pipeline.errors import PipelineError
    from pipeline.graphs.residue_graph import LETTERS as RESIDUE_LETTERS
    from pipeline.planning.task_contract import breaches
    from pipeline.protocol import Encoder, Reader, Task
    from pipeline.records import Entry, Reason, Rejection
    from pipeline.training.checkpoints.trained_weights import NameTable
    from pipeline.training.items.batch import padded_field as padded
    from pipeline.training.own_loops.governed import Governed
    from pipeline.training.own_loops.lightning_callback import GovernorCallback
    from pipeline.training.sampling import SamplerSettings

__all__ = [
    "RESIDUE_LETTERS",
    "Encoder",
    "Entry",
    "Governed",
    "GovernorCallback",
    "NameTable",
    "PipelineError",
    "Reader",
    "Reason",
    "Rejection",
    "SamplerSettings",
    "Task",
    "breaches",
    "cancel",
    "open_loader",
    "padded",
    "predict",
    "predictions",
    "status",
    "submit",
    "wait",
]

PLACES = {
    "RESIDUE_LETTERS": "pipeline.graphs.residue_graph.LETTERS",
    "Encoder": "pipeline.protocol.Encoder",
    "Entry": "pipeline.records.Entry",
    "Governed": "pipeline.training.own_loops.governed.Governed",
    "GovernorCallback": "pipeline.training.own_loops.lightning_callback.GovernorCallback",
    "NameTable": "pipeline.training.checkpoints.trained_weights.NameTable",
    "PipelineError": "pipeline.errors.PipelineError",
    "Reader": "pipeline.protocol.Reader",
    "Reason": "pipeline.records.Reason",
    "Rejection": "pipeline.records.Rejection",
    "SamplerSettings": "pipeline.training.sampling.SamplerSettings",
    "Task": "pipeline.protocol.Task",
    "breaches": "pipeline.planning.task_contract.breaches",
    "open_loader": "pipeline.dataset.loading.open_loader",
    "padded": "pipeline.training.items.batch.padded_field",
} | {
    name: f"pipeline.engine.from_python.{name}"
    for name in ("cancel", "predict", "predictions", "status", "submit", "wait")
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in PLACES:
        raise AttributeError(f"module 'pipeline.api' has no attribute {name!r}")
    module, _, attribute = PLACES[name].rpartition(".")
    return getattr(import_module(module), attribute)
