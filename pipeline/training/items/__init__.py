"""From the cache to a batch: the table of items, where they are read from, how they lie in memory."""
