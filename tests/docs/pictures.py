"""Render docs/report.png, the first screen of an HTML report: `make picture`, or this module and a report's path."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parents[2] / "docs/report.png"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SCREEN = {"width": 1280, "height": 800}


def chromium() -> str | None:
    """Return the path of the Chromium that this machine has."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def main(report: Path) -> None:
    """Write the picture of a report; its age is left out."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_context(viewport=SCREEN, java_script_enabled=False).new_page()  # type: ignore[arg-type]
        page.goto(report.resolve().as_uri())
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
