"""Entry of task jobs; scripts of every version name it."""

import sys

from pipeline.engine.run_task import run_task as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
