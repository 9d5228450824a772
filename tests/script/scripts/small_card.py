# ruff: noqa: T201
"""Dies as torch does where its GPU has no room for a batch, or the host has none."""

import argparse


class OutOfMemoryError(RuntimeError):
    __module__ = "torch"


parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, required=True)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--room", type=int, default=2)
parser.add_argument("--host", action="store_true")
given = parser.parse_args()
if given.batch_size > given.room and given.host:
    raise MemoryError
if given.batch_size > given.room:
    raise OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB"
        " of which 11.06 MiB is free."
    )
print(f"trained with {given.accumulate} times {given.batch_size}")
