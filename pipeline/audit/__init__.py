"""Checks the content of cached records: against the data set, its files and each other."""
