"""Commands, clusters and large data sets."""
