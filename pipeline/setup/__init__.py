"""Before the first run, and without a project: `pipeline init`, `doctor`, `demo` and `dock`."""
