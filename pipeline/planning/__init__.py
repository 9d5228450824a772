"""Plans what a run trains: recipe, memory plan, items, probe, and staging to a node's disk."""
