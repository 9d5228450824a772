"""Does what the cache holds mean anything? Records against the data set and against each other."""
