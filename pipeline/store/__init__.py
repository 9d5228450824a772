"""The cache on disk: immutable shards of safetensors, a rebuildable index, and reads that are always verified."""
