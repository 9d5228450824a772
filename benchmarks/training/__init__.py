"""Steps, loaders and whole trainings."""
