"""The workflow as a table of stages: what each finds missing, how one task of it is done, how it is judged."""
