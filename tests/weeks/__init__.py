"""Weeks of use, played on a real Slurm in minutes: `python -m tests.weeks --seed 1 --minutes 180`."""
