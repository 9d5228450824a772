"""What runs on simulated cards, in a process of its own for each file: `test_on_card.py` starts it."""
