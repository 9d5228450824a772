"""Entry of supervisor jobs; runs of every version are taken up under this name."""

import sys

from pipeline.engine.run_supervisor import supervise as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
