"""What tasks needed: measured peaks, remembered from run to run, and what the next task should ask for."""
