"""The hardware under a step: GPUs by name, a simulator of torch's caching allocator, the host's memory."""
