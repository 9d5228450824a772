"""One exact optimizer step: the step itself, which the planner traces, and its runs over all ranks."""
