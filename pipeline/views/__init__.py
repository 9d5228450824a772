"""What people are shown of a run: estimates before it, efficiency after it, its page."""
