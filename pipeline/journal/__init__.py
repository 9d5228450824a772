"""What a run has written down: its folder, the events in its ledger, their fold into states, its logs."""
