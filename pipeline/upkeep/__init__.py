"""The use of a cache, and the removal of unused records and runs: `cache stat`, `cache clean`, `prune`."""
