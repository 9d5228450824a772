"""Many sequences through one encoder: batches, budgets, reading ahead, and what to do when memory ends."""
