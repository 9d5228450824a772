"""Running code on tensors without data as if it ran on the card: what is seen, what is imitated, what is charged."""
