"""What a cache is used for and what may go: `cache stat` and `cache clean`."""
