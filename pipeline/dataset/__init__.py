"""Which items a run is of, what each stage still has to do for them, and what the store has of them."""
