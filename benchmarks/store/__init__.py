"""The cache and its bytes, against the plainest way to do the same."""
