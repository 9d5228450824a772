"""Before the first run: `pipeline init`, `pipeline doctor` and `pipeline demo`."""
