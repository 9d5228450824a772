"""Entry of task jobs; scripts of every version name it."""

import sys

from pipeline.runs.engine.run_task import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
