"""Memory estimates for models that cannot be traced: small real steps extrapolated, or a formula."""
