"""Loops that others have written: exact steps that outlive an out-of-memory, in one process or over ranks."""
