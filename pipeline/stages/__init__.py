"""One file per stage: read from the store, call the rooms below, write to the store."""
