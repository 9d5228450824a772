"""The configuration: one typed schema over YAML; every value knows its origin."""
