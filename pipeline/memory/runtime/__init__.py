"""Beside a running step: out-of-memory survived, memory measured, budgets governed."""
