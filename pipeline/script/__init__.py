"""`train.command`: runs a user's training script in place of a task."""
