"""`pipeline replay`: one recorded training step, made again on this machine."""
