"""The recipes of `configs/recipes`, as people use them, and what the five guides promise."""
