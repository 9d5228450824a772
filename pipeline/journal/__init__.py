"""The records of a run: its folder, the events in its ledger, its status and its logs."""
