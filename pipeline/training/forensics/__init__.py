"""When a step goes wrong: what is left behind, and how it is made again and searched."""
