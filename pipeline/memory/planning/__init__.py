"""From a request to a plan: groups of sizes, the search for a budget, remedies, comparisons."""
