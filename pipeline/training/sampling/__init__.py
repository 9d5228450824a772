"""Which items make a step, in which order, and how a step is cut over ranks and micro-batches."""
