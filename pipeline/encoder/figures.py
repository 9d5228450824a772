"""What an engine tells of itself while it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Figures:
    """Counts that only grow, but for the budget; changed by the engine alone, read by anybody."""

    sequences: int = 0  # stored
    refused: int = 0
    residues: int = 0  # of what was stored
    encoded_residues: int = 0  # in all forward passes: what windows share counts twice
    tokens: int = 0  # computed for it: ends and filling included, and what windows share twice
    batches: int = 0
    splits: int = 0  # times that memory did not suffice
    again: int = 0  # sequences done again in full precision
    forward_s: float = 0.0
    cost_done: float = 0.0
    budget_tokens: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0
