"""The rules of lint: settings that do harm, or nothing, where people hope to save memory."""

from __future__ import annotations

from pipeline.memory.lint.lint_facts import LintFinding, LintRule, RunFacts, Severity

_DOCS, _PYTORCH = "https://docs.pytorch.org/docs/stable", "https://github.com/pytorch/pytorch"
_ALLOCATOR_DOCS = f"{_DOCS}/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"
_VARIABLES_DOCS = f"{_DOCS}/cuda_environment_variables.html"
_NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_LIGHTNING_DOCS = "https://lightning.ai/docs/pytorch/latest/accelerators/gpu_faq.html"
_TORCHRUN = f"{_PYTORCH}/blob/v2.13.0/torch/distributed/run.py"


def lint(facts: RunFacts) -> tuple[LintFinding, ...]:
    """Return the findings in a run, the worst first."""
    return tuple(
        LintFinding(rule.code, severity, description, rule.why, rule.remedy, rule.source)
        for severity, rules in RULES.items()
        for rule in rules
        if (description := rule.found(facts))
    )


ERRORS = (
    LintRule(
        "allocator-malformed",
        RunFacts.malformed,
        "torch raises when it reads the variable; CUDA builds also reject unknown options",
        "write option:value,option:value as documented",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "accumulated-contrast",
        RunFacts.accumulated_contrast,
        "items are contrasted only with their own micro-batch, which changes the loss",
        "define embed() and contrast() in the task (Contrastive in pipeline/protocol.py): the loss then spans all "
        "micro-batches",
        "https://github.com/luyug/GradCache",
    ),
    LintRule(
        "accumulated-norm",
        lambda facts: "accumulation over BatchNorm" if facts.accumulates and facts.has("BatchNorm") else "",
        "each micro-batch has its own mean and variance, and updates the moving averages: this is not the training of "
        "the whole batch",
        "use GroupNorm or LayerNorm, or one micro-batch a GPU",
        f"{_PYTORCH}/issues/46516",
    ),
    LintRule(
        "mean-of-means",
        lambda facts: "a plain mean of micro-batch means" if facts.accumulates and facts.mean_of_means else "",
        "items in small micro-batches weigh more: a gradient error of 87% was measured",
        "return sums and weights as `Task.loss` does; the step divides once",
        "https://huggingface.co/blog/gradient_accumulation",
    ),
    LintRule(
        "wrong-product",
        RunFacts.wrong_product,
        "the learning rate and schedule were chosen for another effective batch",
        "set batch = micro-batch × accumulation × GPUs, or let the planner choose",
        _LIGHTNING_DOCS,
    ),
    LintRule(
        "changed-batch",
        RunFacts.changed_batch,
        "the effective batch is items per GPU times GPUs; changing the GPUs changes the training",
        "keep the batch and adjust accumulation",
        _LIGHTNING_DOCS,
    ),
)

WARNINGS = (
    LintRule(
        "split-size-of-expandable-segments",
        lambda facts: facts.beside_expandable("max_split_size_mb"),
        "freed blocks above that size are never reused and the segment grows instead: reserved memory grew "
        "from 220 MiB to 14 GiB while 266 MiB were in use",
        "use expandable_segments:True alone",
        f"{_PYTORCH}/issues/123548 and {_PYTORCH}/pull/193400",
    ),
    LintRule(
        "allocator-variables",
        lambda facts: " and ".join(found) + " are set" if len(found := facts.allocator_variables) > 1 else "",
        "both name one setting and torch reads only one: torch 2.13 reads PYTORCH_CUDA_ALLOC_CONF, other versions "
        "PYTORCH_ALLOC_CONF",
        "set one of them, and unset the other",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "async-backend",
        RunFacts.async_backend,
        "cudaMallocAsync ignores these options, and plans assume the native allocator",
        "remove backend",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "no-cache",
        lambda facts: facts.variable("PYTORCH_NO_CUDA_MEMORY_CACHING"),
        "any value, even 0, makes every tensor a cudaMalloc and cudaFree, which wait for the GPU",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING (for memory checkers only)",
        _VARIABLES_DOCS,
    ),
    LintRule(
        "launch-blocking",
        lambda facts: facts.variable("CUDA_LAUNCH_BLOCKING", "1"),
        "the CPU waits for every kernel; use it only to find a failing kernel",
        "unset CUDA_LAUNCH_BLOCKING",
        "https://discuss.pytorch.org/t/cuda-launch-blocking-1-reduces-the-training-speed/160924",
    ),
    LintRule(
        "eager-modules",
        lambda facts: facts.variable("CUDA_MODULE_LOADING", "EAGER"),
        "all kernels are loaded into the context, which can take 1000 MB instead of 300 MB",
        "unset CUDA_MODULE_LOADING",
        f"{_PYTORCH}/issues/107667",
    ),
    LintRule(
        "empty-cache",
        RunFacts.emptied,
        "torch would reuse this memory anyway, and must now allocate it again: "
        "27 to 54 cudaMalloc and cudaFree a step in simulated training",
        "remove it; against fragmentation use expandable_segments:True",
        f"{_DOCS}/notes/cuda.html#memory-management and https://github.com/huggingface/transformers/issues/31372",
    ),
    LintRule(
        "memory-fraction",
        RunFacts.fraction,
        "it only makes torch run out of memory earlier",
        "remove it unless others share the GPU",
        f"{_DOCS}/generated/torch.cuda.memory.set_per_process_memory_fraction.html",
    ),
    LintRule(
        "record-streams",
        lambda facts: facts.variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "false", "False"),
        "tensors of collectives are held longer, so FSDP allocates more than it needs",
        "unset TORCH_NCCL_AVOID_RECORD_STREAMS(the default)",
        f"{_PYTORCH}/issues/147168",
    ),
    LintRule(
        "communication-buffers",
        RunFacts.large_buffers,
        "every channel to every peer has a buffer of this size that torch does not count; the default is 4 MiB",
        "unset NCCL_BUFFSIZE",
        f"{_NCCL_DOCS}#nccl-buffsize",
    ),
    LintRule(
        "more-for-each-gpu",
        RunFacts.more_each,
        "fewer GPUs with the same batch need more memory each",
        "use more micro-batches of the old size",
        _LIGHTNING_DOCS,
    ),
    LintRule(
        "emulated-bf16",
        lambda facts: "bf16 on a GPU without it" if facts.precision == "bf16" and facts.native_bf16 is False else "",
        "below compute capability 8.0 (V100, T4) bf16 is computed in fp32 with casts: slower, although "
        "is_bf16_supported() returns True",
        "use fp16 with loss scaling on these GPUs, or request others",
        f"{_PYTORCH}/pull/148322 and {_PYTORCH}/issues/124996",
    ),
    LintRule(
        "workers-over-lists",
        RunFacts.workers_over_lists,
        "reading a Python object changes its reference count, so workers copy page after page: memory "
        "grows with every epoch",
        "use arrays (numpy, Arrow) instead of lists, or pipeline's loader, which reads in threads",
        f"{_PYTORCH}/issues/13246 and {_PYTORCH}/issues/20433",
    ),
    LintRule(
        "crowded-cores",
        RunFacts.crowded,
        "threads wait for each other, and each has a stack and a malloc arena in host memory",
        "set OMP_NUM_THREADS to at most the cores of a process",
        _TORCHRUN,
    ),
)

INFOS = (
    LintRule(
        "collector-of-expandable-segments",
        lambda facts: facts.beside_expandable("garbage_collection_threshold"),
        "the collector skips expandable segments, so it frees nothing",
        "remove garbage_collection_threshold",
        f"{_PYTORCH}/pull/134338",
    ),
    LintRule(
        "idle-collector",
        RunFacts.idle_collector,
        "the allocator collects only if set_per_process_memory_fraction sets a limit",
        "remove it; against fragmentation use expandable_segments:True",
        f"{_PYTORCH}/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp",
    ),
    LintRule(
        "split-size",
        RunFacts.split_size,
        "a last resort: larger blocks are not split, so they can be reused only for the same size",
        "try expandable_segments:True instead",
        f"{_PYTORCH}/pull/113481",
    ),
    LintRule(
        "coarse-rounding",
        RunFacts.rounded_up,
        "every large block is rounded up to the next division between powers of two, which wastes memory",
        "use 8 divisions or more, or expandable_segments:True instead",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "rounding-by-one",
        lambda facts: "roundup_power2_divisions of 1" if 1 in facts.divisions() else "",
        "one division means no rounding",
        "remove it, or use 2 or more",
        f"{_PYTORCH}/issues/161139",
    ),
    LintRule(
        "reset-peak",
        lambda facts: facts.hoped("reset_peak_memory_stats", "reset_peak_memory_stats()"),
        "it resets the peak counters and frees nothing",
        "use it only for measuring",
        f"{_DOCS}/generated/torch.cuda.memory.reset_peak_memory_stats.html",
    ),
    LintRule(
        "no-peer-to-peer",
        lambda facts: facts.variable("NCCL_P2P_DISABLE", "1"),
        "for debugging only: GPUs communicate through host shared memory, which is slower and counts toward --mem",
        "unset NCCL_P2P_DISABLE unless the machine needs it",
        f"{_NCCL_DOCS}#nccl-p2p-disable",
    ),
    LintRule(
        "uneven-batch",
        RunFacts.uneven,
        "some GPUs have one item more and others wait; plain means over GPUs weigh items unevenly",
        "use a multiple of the number of GPUs",
        _LIGHTNING_DOCS,
    ),
    LintRule(
        "norm-of-each-gpu",
        RunFacts.local_norm,
        "its statistics cover the items of one GPU and change with their number",
        "use torch.nn.SyncBatchNorm.convert_sync_batchnorm or another norm",
        f"{_DOCS}/generated/torch.nn.SyncBatchNorm.html",
    ),
    LintRule(
        "foreach-temporaries",
        RunFacts.foreach,
        "a foreach optimizer makes lists of temporaries as large as all parameters; a fused one has none",
        "optimizer way: fused",
        f"{_DOCS}/generated/torch.optim.AdamW.html",
    ),
    LintRule(
        "clipping",
        lambda facts: facts.hoped("clip", "gradients are clipped"),
        "clipping scales complete gradients in place and saves no memory",
        "keep it for stability",
        f"{_DOCS}/generated/torch.nn.utils.clip_grad_norm_.html",
    ),
    LintRule(
        "prefetch",
        lambda facts: facts.hoped("prefetch", "fewer batches are read ahead"),
        "prefetched batches are in host memory",
        "keep it; a smaller micro-batch saves GPU memory",
        f"{_PYTORCH}/blob/v2.13.0/torch/utils/data/dataloader.py",
    ),
    LintRule(
        "cudnn-plans",
        RunFacts.plans_kept,
        "cuDNN keeps a plan of each shape in host memory: 200 KiB each, up to 2 GiB a thread",
        "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT=1000",
        f"{_PYTORCH}/issues/104701 and {_VARIABLES_DOCS}",
    ),
    LintRule(
        "unlimited-threads",
        RunFacts.unlimited,
        "each process starts as many threads as the machine has cores; torchrun therefore sets 1",
        "set OMP_NUM_THREADS = cores / processes",
        _TORCHRUN,
    ),
)
RULES = {Severity.ERROR: ERRORS, Severity.WARNING: WARNINGS, Severity.INFO: INFOS}  # the worst first
