"""`pipeline replay`: runs one recorded training step again on this machine."""
