"""On what a step runs: GPUs by name, torch's caching allocator simulated, the memory of the host."""
