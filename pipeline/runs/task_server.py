"""Entry of the process from which the tasks of a run on this machine are forked."""

import sys

from pipeline.cluster.fork_server import serve

TORCH = ("torch", "torch._dynamo")  # of which it tells the memory: see `host_memory.TRAINING`
STAGES = ("pipeline.runs.engine.run_task", "pipeline.stages.embed", "pipeline.stages.train", "pipeline.stages.apply")


def main(words: list[str]) -> int:
    """Serve; in a fork, do its task."""
    task = serve(int(words[0]), TORCH, STAGES)
    from pipeline.runs.engine.run_task import run_task

    return run_task(task)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
