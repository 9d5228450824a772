"""The device under a computation: its memory, streams, pinning, random numbers and errors, of the CPU or any card."""
