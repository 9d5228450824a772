"""Turns a project's configuration into recipes, stores and user code; freezes the code of runs."""
