"""The items of a run: their list, their splits, and what each stage still has to do for them."""
