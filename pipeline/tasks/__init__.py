"""Reference tasks with their models, loaded by name like a user's."""
