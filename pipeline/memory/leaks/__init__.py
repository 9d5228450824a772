"""What makes memory grow from step to step: found, and told with the line that made it and who holds it."""
