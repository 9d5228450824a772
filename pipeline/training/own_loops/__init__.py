"""Users' own training loops: exact steps that survive an out-of-memory, in one process or over ranks."""
