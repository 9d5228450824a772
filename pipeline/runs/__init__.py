"""A run: what is submitted, followed, judged and reported."""
