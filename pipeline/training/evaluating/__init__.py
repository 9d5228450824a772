"""A trained model applied to a split: losses, metrics, outputs, tables of predictions."""
