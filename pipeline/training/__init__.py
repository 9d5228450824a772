"""From the cache to a training step: which items make a step, and how they come into memory."""
