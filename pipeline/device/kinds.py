"""Names of devices in configurations, plans, the environment and logs; nothing here imports torch.

A machine without a card can make a plan. The plan names the kind `CARD`; the process that runs it asks
`accelerator.located` for its own card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

CPU = "cpu"
CARD = "cuda"  # as torch calls the cards that plans are for; ROCm's have this name too
DeviceChoice: TypeAlias = Literal["auto", "cpu", "cuda"]  # what `embed.device` may be
NOT_CARDS = frozenset({CPU, "meta", "mps"})  # MPS reports no memory, so a Mac computes on its CPU

# In the environment
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the cards that a process may use
VISIBLE_TO = frozenset({VISIBLE, "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"})
SETTINGS = ("PYTORCH_", "CUDA_", "TORCH_", "NCCL_", "OMP_")  # how variables begin that change what torch does
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"  # of NVIDIA's MPS, by which kernels of several processes overlap
DRIVER = Path("/sys/module/nvidia/version")

# In errors and logs: memory of a card that ended. torch's own allocator raises `torch.OutOfMemoryError`; these go past
# it: the driver and pinned memory ("CUDA error: out of memory"), and the libraries ("CUDA error:
# CUBLAS_STATUS_ALLOC_FAILED when calling …", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED").
CARD_IS_FULL = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "cudaErrorMemoryAllocation",
    "STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # there was no memory for its handle
    "Triton Error [CUDA]: out of memory",
    "_ALLOCATION_FAILED",  # as cuDNN 9 says it, of the host and of the card
)
# The same, as only logs have it: torch's own and other libraries'.
LOG_OF_FULL_CARD = (
    "CUDA out of memory",
    "HIP out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "torch.OutOfMemoryError",
    "Failed to CUDA calloc",  # so NCCL says it, and the next, with or without a number
    "'out of memory'",
)
# torch's allocator for the CPU raises a plain RuntimeError: "[enforce fail at alloc_cpu.cpp:127] err == 0.
# DefaultCPUAllocator: can't allocate memory: you tried to allocate N bytes. Error code 12 (Cannot allocate memory)"
HOST_IS_FULL = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
LOG_OF_BROKEN_CARD = ("no CUDA-capable device", "CUDA driver initialization failed", "has fallen off the bus")
