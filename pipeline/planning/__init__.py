"""The training of one run: its plan, its items, its trial on a card, its staging to a node's disk."""
