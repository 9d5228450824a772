"""What your own code may import. Everything else in this package may change from version to version.

Tasks, readers and encoders: the protocols that yours can be checked against, what a reader yields, and `breaches`,
which tries a task out. `NameTable`: the names under which your model's weights were published. Loops of your own:
`open_loader` with its `SamplerSettings`, `Governed` for plain PyTorch, `GovernorCallback` for Lightning. Runs from
notebooks and other programs: `submit`, `status`, `wait`, `cancel`, `predict`, and `predictions`, which reads them.
Nothing here imports torch before it is asked for.
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
    """Import a public name when it is first asked for."""
    if name not in PLACES:
        raise AttributeError(f"module 'pipeline.api' has no attribute {name!r}")
    module, _, attribute = PLACES[name].rpartition(".")
    return getattr(import_module(module), attribute)
