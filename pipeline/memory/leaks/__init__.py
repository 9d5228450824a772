"""Memory leaks in training: found while it runs, with the line that allocated and the object that holds on."""
