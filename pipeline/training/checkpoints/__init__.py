"""What stands between two steps, written and read: whole or not at all."""
