"""Measured memory of tasks and steps, kept from run to run, and the requests that follow from it."""
