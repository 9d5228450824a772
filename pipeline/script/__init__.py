"""`train.command`: a training script of the user's, run in place of a task and followed as its processes."""
