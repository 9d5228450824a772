"""What people write: one typed schema over YAML, with the origin of every value."""
