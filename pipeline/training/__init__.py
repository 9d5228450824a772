"""Training one model: sampling, items, exact steps, ranks, checkpoints, evaluation and the loop over them."""
