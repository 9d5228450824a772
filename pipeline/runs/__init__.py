"""A run: what is missing, in which jobs, who follows them, and what is judged when they have ended."""
