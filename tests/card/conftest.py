"""Tests on simulated cards are collected only in processes of their own."""

from __future__ import annotations

import os

from tests.card.card import INSIDE

collect_ignore = [] if os.environ.get(INSIDE) else ["on_card"]
