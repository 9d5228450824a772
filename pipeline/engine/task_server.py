"""Entry of the process from which the tasks of a run on this machine are forked."""

import sys

from pipeline.cluster.fork_server import serve

TORCH = ("torch", "torch._dynamo")  # whose memory it reports: see `host_memory.TRAINING`
STAGES = (
    "pipeline.engine.worker",
    "pipeline.encoder.embed_texts",
    "pipeline.training.loop.train",
    "pipeline.training.evaluating.results",
)


def main(words: list[str]) -> int:
    """Serve; in a fork, do its task."""
    task = serve(int(words[0]), TORCH, STAGES)
    from pipeline.engine import worker

    return worker.main(task)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
