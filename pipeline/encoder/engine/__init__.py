"""Encodes many sequences: batches, token budgets, reading ahead, and fallbacks after an out-of-memory."""
