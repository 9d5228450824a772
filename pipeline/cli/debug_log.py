"""Log lines on stderr; `--debug` shows all."""

from __future__ import annotations

import logging

from pipeline.config.masking import without_secrets


class Hiding(logging.Formatter):
    """Masks secrets in log lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a log record."""
        return without_secrets(super().format(record))


def show_log(*, debug: bool) -> None:
    """Log warnings to stderr; with `debug`, everything."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Hiding("%(levelname)s: %(message)s"))
