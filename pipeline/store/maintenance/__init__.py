"""Maintains a cache: finds and repairs damage, removes unused records, compacts, moves and stages shards."""
