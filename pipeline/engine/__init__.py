"""Runs: submit, supervise, dispatch, repair, hand over, cancel; and the worker inside a job."""
