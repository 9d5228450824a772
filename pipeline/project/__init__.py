"""What one project's configuration means: recipes, stores, the user's code, and the code that a run froze."""
