"""Plans against measured peaks."""
