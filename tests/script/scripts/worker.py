"""Runs a script as a task's worker does, and writes down how it ended."""

import json
import os
import sys
from pathlib import Path

from pipeline.script.script_process import run_script

told, mem_bytes, *words = sys.argv[1:]
outcome = run_script(words, environment=dict(os.environ), cwd=Path.cwd(), mem_bytes=int(mem_bytes))
kept = {
    name: getattr(outcome, name)
    for name in ("exit_code", "signal", "handled_signal", "trouble", "goes_on", "step", "what")
}
Path(told).write_text(json.dumps(kept))
sys.exit(outcome.code)
