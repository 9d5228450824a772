"""Listens for no signal; the second of its processes does not either."""

import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
(folder / "child").write_text(str(child.pid))
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
