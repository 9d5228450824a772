"""The epochs: the trainer, where it stands, who is told, what is logged."""
