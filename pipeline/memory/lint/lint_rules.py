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
        "torch raises when it reads the variable; a CUDA build also refuses options whose names it does not know",
        "write option:value,option:value as the page shows",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "accumulated-contrast",
        RunFacts.accumulated_contrast,
        "an item is told apart only from those in its own micro-batch, so that the loss is another one",
        "give the task embed() and contrast() (Contrastive in pipeline/protocol.py): micro-batches are embedded, the "
        "loss is of them all",
        "https://github.com/luyug/GradCache",
    ),
    LintRule(
        "accumulated-norm",
        lambda facts: "accumulation over BatchNorm" if facts.accumulates and facts.has("BatchNorm") else "",
        "mean and variance are of each micro-batch, and their moving averages go on several times a step: it is not "
        "what the whole batch would train",
        "GroupNorm or LayerNorm, or a micro-batch that is the whole share of a GPU",
        f"{_PYTORCH}/issues/46516",
    ),
    LintRule(
        "mean-of-means",
        lambda facts: (
            "the plain mean of the means of micro-batches" if facts.accumulates and facts.mean_of_means else ""
        ),
        "items of small micro-batches count for more than those of large ones: the gradient was seen to be 87% off",
        "return sums and weights, as `Task.loss` does here; the step divides once",
        "https://huggingface.co/blog/gradient_accumulation",
    ),
    LintRule(
        "wrong-product",
        RunFacts.wrong_product,
        "the learning rate and the schedule were chosen for the effective batch",
        "choose batch = micro-batch × accumulation × GPUs, or leave the cuts to the planner",
        _LIGHTNING_DOCS,
    ),
    LintRule(
        "changed-batch",
        RunFacts.changed_batch,
        "the effective batch is the items of a GPU times the GPUs; with others of them another run is trained",
        "keep the batch and let accumulation make up for it",
        _LIGHTNING_DOCS,
    ),
)

WARNINGS = (
    LintRule(
        "split-size-of-expandable-segments",
        lambda facts: facts.beside_expandable("max_split_size_mb"),
        "freed blocks above that size are never given out again, and the segment grows in their place: reserved memory "
        "grew from 220 MiB to 14 GiB while 266 MiB were in use",
        "keep expandable_segments:True alone",
        f"{_PYTORCH}/issues/123548 and {_PYTORCH}/pull/193400",
    ),
    LintRule(
        "allocator-variables",
        lambda facts: " and ".join(found) + " are set" if len(found := facts.allocator_variables) > 1 else "",
        "they are names of one setting and only one is read: torch 2.13 takes PYTORCH_CUDA_ALLOC_CONF, other versions "
        "PYTORCH_ALLOC_CONF",
        "set one of them, and unset the other",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "async-backend",
        RunFacts.async_backend,
        "these are options of the native allocator, which cudaMallocAsync ignores; plans are of the native one, too",
        "leave backend out",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "no-cache",
        lambda facts: facts.variable("PYTORCH_NO_CUDA_MEMORY_CACHING"),
        "set to anything, 0 as well, it makes every tensor a cudaMalloc and a cudaFree, which waits for the GPU",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING: it is for memory checkers",
        _VARIABLES_DOCS,
    ),
    LintRule(
        "launch-blocking",
        lambda facts: facts.variable("CUDA_LAUNCH_BLOCKING", "1"),
        "the CPU waits for every kernel; it is for finding the one that fails",
        "unset CUDA_LAUNCH_BLOCKING",
        "https://discuss.pytorch.org/t/cuda-launch-blocking-1-reduces-the-training-speed/160924",
    ),
    LintRule(
        "eager-modules",
        lambda facts: facts.variable("CUDA_MODULE_LOADING", "EAGER"),
        "all kernels of all libraries are loaded into the context, which took more than 1000 MB where 300 are enough",
        "unset CUDA_MODULE_LOADING",
        f"{_PYTORCH}/issues/107667",
    ),
    LintRule(
        "empty-cache",
        RunFacts.emptied,
        "it gives torch no memory that torch would not have used again, and the next step asks the driver for it anew: "
        "27 to 54 cudaMalloc and cudaFree a step in simulated training",
        "leave it out; where memory is fragmented, expandable_segments:True",
        f"{_DOCS}/notes/cuda.html#memory-management and https://github.com/huggingface/transformers/issues/31372",
    ),
    LintRule(
        "memory-fraction",
        RunFacts.fraction,
        "it only makes torch raise out-of-memory earlier, by what is left over; nothing becomes smaller",
        "leave it out unless others use the card too",
        f"{_DOCS}/generated/torch.cuda.memory.set_per_process_memory_fraction.html",
    ),
    LintRule(
        "record-streams",
        lambda facts: facts.variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "false", "False"),
        "tensors of collectives are held until the CPU looks again, so that FSDP allocates more than it needs",
        "unset TORCH_NCCL_AVOID_RECORD_STREAMS: not to record is the default",
        f"{_PYTORCH}/issues/147168",
    ),
    LintRule(
        "communication-buffers",
        RunFacts.large_buffers,
        "every channel to every peer has a buffer of this size, outside what torch counts; the default is 4 MiB",
        "unset NCCL_BUFFSIZE",
        f"{_NCCL_DOCS}#nccl-buffsize",
    ),
    LintRule(
        "more-for-each-gpu",
        RunFacts.more_each,
        "fewer GPUs with the same batch need more memory each",
        "accumulate: more micro-batches of the old size",
        _LIGHTNING_DOCS,
    ),
    LintRule(
        "emulated-bf16",
        lambda facts: "bf16 on a card without it" if facts.precision == "bf16" and facts.native_bf16 is False else "",
        "below compute capability 8.0 (V100, T4) bf16 is computed in fp32 with casts around it: slower, and "
        "is_bf16_supported() says yes all the same",
        "fp16 with loss scaling on these cards, or ask for others",
        f"{_PYTORCH}/pull/148322 and {_PYTORCH}/issues/124996",
    ),
    LintRule(
        "workers-over-lists",
        RunFacts.workers_over_lists,
        "looking at a Python object writes its reference count, so that each worker copies page after page: memory "
        "grows with every epoch",
        "arrays (numpy, Arrow) in place of lists, or the loader here, which reads in threads",
        f"{_PYTORCH}/issues/13246 and {_PYTORCH}/issues/20433",
    ),
    LintRule(
        "crowded-cores",
        RunFacts.crowded,
        "threads wait for each other, and each has a stack and an arena of malloc in the host's memory",
        "OMP_NUM_THREADS at most the cores of a process",
        _TORCHRUN,
    ),
)

INFOS = (
    LintRule(
        "collector-of-expandable-segments",
        lambda facts: facts.beside_expandable("garbage_collection_threshold"),
        "the collector passes over blocks of expandable segments, so it frees nothing",
        "leave garbage_collection_threshold out",
        f"{_PYTORCH}/pull/134338",
    ),
    LintRule(
        "idle-collector",
        RunFacts.idle_collector,
        "the allocator collects only where set_per_process_memory_fraction has set a limit to compare with",
        "leave it out; expandable_segments:True is what helps against fragmentation",
        f"{_PYTORCH}/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp",
    ),
    LintRule(
        "split-size",
        RunFacts.split_size,
        "a last resort: larger blocks are no longer split, so that a freed one waits for a request of its own size, "
        "and emptying such segments costs time",
        "try expandable_segments:True in its place",
        f"{_PYTORCH}/pull/113481",
    ),
    LintRule(
        "coarse-rounding",
        RunFacts.rounded_up,
        "every large block is rounded up to the next division between powers of two, and what is added is lost",
        "8 divisions or more, or expandable_segments:True in its place",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "rounding-by-one",
        lambda facts: "roundup_power2_divisions of 1" if 1 in facts.divisions() else "",
        "one division is read as none: nothing is rounded to a power of two",
        "leave it out, or take 2 and more",
        f"{_PYTORCH}/issues/161139",
    ),
    LintRule(
        "reset-peak",
        lambda facts: facts.hoped("reset_peak_memory_stats", "reset_peak_memory_stats()"),
        "it resets the counters of the peak and frees nothing",
        "keep it for measuring",
        f"{_DOCS}/generated/torch.cuda.memory.reset_peak_memory_stats.html",
    ),
    LintRule(
        "no-peer-to-peer",
        lambda facts: facts.variable("NCCL_P2P_DISABLE", "1"),
        "for debugging: GPUs then talk through the host's shared memory, which is slower and counts in --mem",
        "unset NCCL_P2P_DISABLE unless the machine needs it",
        f"{_NCCL_DOCS}#nccl-p2p-disable",
    ),
    LintRule(
        "uneven-batch",
        RunFacts.uneven,
        "some GPUs have an item more than others, which wait for them; plain means over GPUs then weigh items unevenly",
        "a multiple of the GPUs",
        _LIGHTNING_DOCS,
    ),
    LintRule(
        "norm-of-each-gpu",
        RunFacts.local_norm,
        "its statistics are of the items of one GPU: they change with how many there are",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or another norm",
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
        "gradients are scaled in place, after all of them are there: nothing becomes smaller",
        "keep it for stability",
        f"{_DOCS}/generated/torch.nn.utils.clip_grad_norm_.html",
    ),
    LintRule(
        "prefetch",
        lambda facts: facts.hoped("prefetch", "fewer batches are read ahead"),
        "batches that were read ahead are in the host's memory",
        "leave it as it is; a smaller micro-batch saves GPU memory",
        f"{_PYTORCH}/blob/v2.13.0/torch/utils/data/dataloader.py",
    ),
    LintRule(
        "cudnn-plans",
        RunFacts.plans_kept,
        "cuDNN's plan of each shape is kept in the host's memory, 200 KiB each and 10 000 for a thread: up to 2 GiB",
        "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT=1000",
        f"{_PYTORCH}/issues/104701 and {_VARIABLES_DOCS}",
    ),
    LintRule(
        "unlimited-threads",
        RunFacts.unlimited,
        "each process starts as many threads as the machine has cores; torchrun sets 1 for that reason",
        "OMP_NUM_THREADS = cores / processes",
        _TORCHRUN,
    ),
)
RULES = {Severity.ERROR: ERRORS, Severity.WARNING: WARNINGS, Severity.INFO: INFOS}  # the worst first
