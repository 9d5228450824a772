"""`python -m pipeline` is `pipeline`."""

from pipeline.cli.main import main

main()
