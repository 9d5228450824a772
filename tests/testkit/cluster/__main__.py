"""`python -m tests.testkit.cluster up|down|status [folder]`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.testkit.cluster.cluster import DEFAULT_FOLDER, Cluster, exports, why_not


def main() -> int:
    """Do what was typed and return the exit code."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    cluster = Cluster(Path(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT_FOLDER)
    if verb not in ("up", "down", "status"):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    if reason := why_not():
        sys.stderr.write(f"no test cluster here: {reason}\n")
        return 1
    return {"up": _up, "down": _down, "status": _status}[verb](cluster)


def _up(cluster: Cluster) -> int:
    cluster.start()
    return _status(cluster)


def _down(cluster: Cluster) -> int:
    cluster.stop()
    return 0


def _status(cluster: Cluster) -> int:
    if not cluster.conf.exists():
        sys.stdout.write("down\n")
        return 1
    states = ", ".join(f"{node}: {state}" for node, state in cluster.node_states().items())
    sys.stdout.write(f"# {states}\n{exports(cluster.env())}\n")
    return 0 if cluster.is_healthy() else 1


if __name__ == "__main__":
    sys.exit(main())
