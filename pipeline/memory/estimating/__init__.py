"""What a model takes that cannot be traced: small real steps extrapolated, or a formula."""
