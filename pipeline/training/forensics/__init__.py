"""Failed steps: bundles on disk, their replay, and the search for values that are not finite."""
