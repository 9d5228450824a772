"""Memory while a training runs: meters, recovery from out-of-memory, and the budget of micro-batches."""
