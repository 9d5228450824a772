"""Beside a running step: out-of-memory told apart and survived, memory measured, budgets governed."""
