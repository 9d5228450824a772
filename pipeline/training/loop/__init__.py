"""The training loop: trainer, phases, observer and metrics."""
