"""`pipeline` and `python -m pipeline`: Ctrl-C ends quietly from the first import on."""

import sys

INTERRUPTED = 130  # exit code of shells for SIGINT


def main() -> None:
    """Run the command line that was typed."""
    try:
        from pipeline.cli.main import main as typed

        typed()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
