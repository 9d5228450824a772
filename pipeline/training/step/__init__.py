"""One exact optimizer step: what is traced, how a rank survives running it, what all ranks agree on."""
