"""The memory of training: predicted before submission, measured while it runs, remembered for later plans."""
