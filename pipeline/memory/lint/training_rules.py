"""What is known to be wrong with batches and losses, precision, norms, optimizers, compilers and loaders."""

from __future__ import annotations

import re

from pipeline.memory.hardware.host_memory import pinned_bytes
from pipeline.memory.lint import allocator_rules
from pipeline.memory.lint.allocator_rules import hoped
from pipeline.memory.lint.lint_facts import LintFinding, LintRule, RunFacts, Severity, allocator_options, leading_number

MIB = 1 << 20
WORTH_SAYING = 0.02  # of a card's memory
MUCH_READ_AHEAD_BYTES = 1024 * MIB
WASTEFUL = 1.25  # times what was asked for
GRAPHED = frozenset({"reduce-overhead", "max-autotune"})  # modes of torch.compile that record CUDA graphs
_DOCS, _PYTORCH = "https://docs.pytorch.org/docs/stable", "https://github.com/pytorch/pytorch"
_VARIABLES_DOCS = f"{_DOCS}/cuda_environment_variables.html"


def _read_ahead(facts: RunFacts) -> str:
    ahead = (facts.num_workers or 0) * (facts.prefetch or 2)
    if not facts.batch_bytes or ahead * facts.batch_bytes <= MUCH_READ_AHEAD_BYTES:
        return ""
    return f"{ahead} batches are read ahead: {ahead * facts.batch_bytes / (1024 * MIB):.1f} GiB of the host's memory"


def _workers_over_lists(facts: RunFacts) -> str:
    copied = facts.data_container in {"list", "dict", "tuple", "set"} and (facts.num_workers or 0) > 0
    return f"{facts.num_workers} worker processes over a data set in a Python {facts.data_container}" if copied else ""


def _pinned(facts: RunFacts) -> str:
    if not facts.pin or not facts.batch_bytes or "pinned_max_round_threshold_mb" in facts.allocator:
        return ""
    taken = pinned_bytes(facts.batch_bytes)
    if taken < WASTEFUL * facts.batch_bytes:
        return ""
    return f"a pinned batch of {facts.batch_bytes / MIB:.0f} MiB takes {taken / MIB:.0f} MiB"


def _wrong_product(facts: RunFacts) -> str:
    if None in (facts.batch, facts.micro_batch, facts.accumulation, facts.gpus):
        return ""
    micro, times, gpus = facts.micro_batch or 0, facts.accumulation or 0, facts.gpus or 0
    product = micro * times * gpus
    return f"{micro} items × {times} × {gpus} GPUs are {product}, not {facts.batch}" if product != facts.batch else ""


def _uneven(facts: RunFacts) -> str:
    if not facts.batch or not facts.gpus or facts.batch % facts.gpus == 0:
        return ""
    return f"a batch of {facts.batch} on {facts.gpus} GPUs"


def _changed_batch(facts: RunFacts) -> str:
    if not facts.before_gpus or not facts.gpus or facts.gpus == facts.before_gpus or facts.micro_batch is None:
        return ""
    times = facts.accumulation or 1
    now, then = facts.micro_batch * facts.gpus * times, facts.before_batch
    if facts.micro_batch != facts.before_micro_batch or then is None or now == then:
        return ""
    gpus = f"{facts.gpus} GPUs instead of {facts.before_gpus}"
    return f"{gpus} with {facts.micro_batch} items each: {now} a step, not {then}"


def _more_each(facts: RunFacts) -> str:
    if not facts.before_gpus or not facts.gpus or facts.gpus >= facts.before_gpus or not facts.batch:
        return ""
    if facts.batch != facts.before_batch or facts.accumulates:
        return ""
    now, then = -(-facts.batch // facts.gpus), -(-facts.batch // facts.before_gpus)
    return f"{facts.gpus} GPUs instead of {facts.before_gpus} for the same batch: {now} items each, not {then}"


def _accumulated_norm(facts: RunFacts) -> str:
    return "accumulation over BatchNorm" if facts.accumulates and facts.has("BatchNorm") else ""


def _local_norm(facts: RunFacts) -> str:
    local = (facts.gpus or 1) > 1 and facts.has("BatchNorm") and not facts.has("SyncBatchNorm")
    return f"BatchNorm on {facts.gpus} GPUs, each by itself" if local else ""


def _accumulated_contrast(facts: RunFacts) -> str:
    if not facts.accumulates or not facts.in_batch_contrastive or facts.two_passes:
        return ""
    micro, times = facts.micro_batch or 0, facts.accumulation or 0
    sizes = f": {micro} × {times} has {micro - 1} negatives, not {micro * times - 1}" if micro else ""
    return f"accumulation over a loss with in-batch negatives{sizes}"


def _mean_of_means(facts: RunFacts) -> str:
    return "the plain mean of the means of micro-batches" if facts.accumulates and facts.mean_of_means else ""


def _unscaled(facts: RunFacts) -> str:
    return "fp16 without loss scaling" if facts.precision == "fp16" and facts.loss_scaling is False else ""


def _emulated(facts: RunFacts) -> str:
    return "bf16 on a card without it" if facts.precision == "bf16" and facts.native_bf16 is False else ""


def _foreach(facts: RunFacts) -> str:
    size, card = facts.parameter_bytes or 0, facts.gpu_bytes or 0
    worth = facts.optimizer_way == "foreach" and card and size > WORTH_SAYING * card
    return f"a foreach optimizer: its temporaries are about {size / MIB:.0f} MiB" if worth else ""


def _convolves(facts: RunFacts) -> bool:
    """Say whether cuDNN has convolutions to compute: those of graphs are none."""
    return any(re.search(r"Conv(Transpose)?[123]d", name) for name in facts.module_types)


def _benchmarked(facts: RunFacts) -> str:
    searched = facts.cudnn_benchmark and facts.variable_shapes and _convolves(facts)
    return "cudnn.benchmark with inputs of varying shapes" if searched else ""


def _plans_kept(facts: RunFacts) -> str:
    kept = facts.variable_shapes and _convolves(facts) and "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT" not in facts.environment
    return "convolutions over inputs of varying shapes" if kept else ""


def _compiled_again(facts: RunFacts) -> str:
    again = facts.compile_mode is not None and facts.variable_shapes and facts.compile_dynamic is False
    return "torch.compile(dynamic=False) with inputs of varying shapes" if again else ""


def _graphed(facts: RunFacts) -> str:
    graphed = facts.compile_mode in GRAPHED and facts.variable_shapes
    return f"torch.compile(mode={facts.compile_mode!r}) with inputs of varying shapes" if graphed else ""


def _crowded(facts: RunFacts) -> str:
    threads = leading_number(facts.environment.get("OMP_NUM_THREADS", "")) or 0
    crowded = facts.cpus and threads > facts.cpus
    return f"OMP_NUM_THREADS={threads:.0f} on {facts.cpus} cores" if crowded else ""


def _unlimited(facts: RunFacts) -> str:
    unlimited = (facts.gpus or 1) > 1 and not facts.environment.get("OMP_NUM_THREADS")
    return f"OMP_NUM_THREADS is not set for {facts.gpus} processes" if unlimited else ""


TRAINING_RULES = (
    LintRule(
        "accumulated-contrast",
        Severity.ERROR,
        _accumulated_contrast,
        "an item is told apart only from those in its own micro-batch, so that the loss is another one",
        "give the task embed() and contrast() (Contrastive in pipeline/protocol.py): micro-batches are embedded, the "
        "loss is of them all",
        "https://github.com/luyug/GradCache",
    ),
    LintRule(
        "accumulated-norm",
        Severity.ERROR,
        _accumulated_norm,
        "mean and variance are of each micro-batch, and their moving averages go on several times a step: it is not "
        "what the whole batch would train",
        "GroupNorm or LayerNorm, or a micro-batch that is the whole share of a GPU",
        f"{_PYTORCH}/issues/46516",
    ),
    LintRule(
        "mean-of-means",
        Severity.ERROR,
        _mean_of_means,
        "items of small micro-batches count for more than those of large ones: the gradient was seen to be 87% off",
        "return sums and weights, as `Task.loss` does here; the step divides once",
        "https://huggingface.co/blog/gradient_accumulation",
    ),
    LintRule(
        "wrong-product",
        Severity.ERROR,
        _wrong_product,
        "the learning rate and the schedule were chosen for the effective batch",
        "choose batch = micro-batch × accumulation × GPUs, or leave the cuts to the planner",
        "https://lightning.ai/docs/pytorch/latest/accelerators/gpu_faq.html",
    ),
    LintRule(
        "changed-batch",
        Severity.ERROR,
        _changed_batch,
        "the effective batch is the items of a GPU times the GPUs; with others of them another run is trained",
        "keep the batch and let accumulation make up for it",
        "https://lightning.ai/docs/pytorch/latest/accelerators/gpu_faq.html",
    ),
    LintRule(
        "unscaled-fp16",
        Severity.ERROR,
        _unscaled,
        "small gradients become 0 in half precision",
        "torch.amp.GradScaler, or bf16 where the cards have it",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    ),
    LintRule(
        "more-for-each-gpu",
        Severity.WARNING,
        _more_each,
        "fewer GPUs with the same batch need more memory each",
        "accumulate: more micro-batches of the old size",
        "https://lightning.ai/docs/pytorch/latest/accelerators/gpu_faq.html",
    ),
    LintRule(
        "uneven-batch",
        Severity.INFO,
        _uneven,
        "some GPUs have an item more than others, which wait for them; plain means over GPUs then weigh items unevenly",
        "a multiple of the GPUs",
        "https://lightning.ai/docs/pytorch/latest/accelerators/gpu_faq.html",
    ),
    LintRule(
        "norm-of-each-gpu",
        Severity.INFO,
        _local_norm,
        "its statistics are of the items of one GPU: they change with how many there are",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or another norm",
        f"{_DOCS}/generated/torch.nn.SyncBatchNorm.html",
    ),
    LintRule(
        "emulated-bf16",
        Severity.WARNING,
        _emulated,
        "below compute capability 8.0 (V100, T4) bf16 is computed in fp32 with casts around it: slower, and "
        "is_bf16_supported() says yes all the same",
        "fp16 with loss scaling on these cards, or ask for others",
        f"{_PYTORCH}/pull/148322 and {_PYTORCH}/issues/124996",
    ),
    LintRule(
        "foreach-temporaries",
        Severity.INFO,
        _foreach,
        "a foreach optimizer makes lists of temporaries as large as all parameters; a fused one has none",
        "optimizer way: fused",
        f"{_DOCS}/generated/torch.optim.AdamW.html",
    ),
    LintRule(
        "clipping",
        Severity.INFO,
        hoped("clip", "gradients are clipped"),
        "gradients are scaled in place, after all of them are there: nothing becomes smaller",
        "keep it for stability",
        f"{_DOCS}/generated/torch.nn.utils.clip_grad_norm_.html",
    ),
    LintRule(
        "prefetch",
        Severity.INFO,
        hoped("prefetch", "fewer batches are read ahead"),
        "batches that were read ahead are in the host's memory",
        "leave it as it is; a smaller micro-batch saves GPU memory",
        f"{_PYTORCH}/blob/v2.13.0/torch/utils/data/dataloader.py",
    ),
    LintRule(
        "read-ahead",
        Severity.INFO,
        _read_ahead,
        "every worker process holds its own batches, in shared memory of the host, which counts in --mem",
        "fewer workers, or a smaller prefetch_factor",
        f"{_PYTORCH}/blob/v2.13.0/torch/utils/data/dataloader.py",
    ),
    LintRule(
        "workers-over-lists",
        Severity.WARNING,
        _workers_over_lists,
        "looking at a Python object writes its reference count, so that each worker copies page after page: memory "
        "grows with every epoch",
        "arrays (numpy, Arrow) in place of lists, or the loader here, which reads in threads",
        f"{_PYTORCH}/issues/13246 and {_PYTORCH}/issues/20433",
    ),
    LintRule(
        "pinned-rounding",
        Severity.INFO,
        _pinned,
        "torch rounds pinned memory up to powers of two",
        "pinned_max_round_threshold_mb in PYTORCH_ALLOC_CONF (torch 2.13), or batches just below a power of two",
        f"{_PYTORCH}/issues/95823 and {_PYTORCH}/pull/171662",
    ),
    LintRule(
        "cudnn-benchmark",
        Severity.WARNING,
        _benchmarked,
        "each new shape is searched for the fastest algorithm with workspaces of some GB, and the cache emptied after",
        "torch.backends.cudnn.benchmark = False",
        f"{_PYTORCH}/issues/50190 and https://discuss.pytorch.org/t/what-does-torch-backends-cudnn-benchmark-do/5936",
    ),
    LintRule(
        "cudnn-plans",
        Severity.INFO,
        _plans_kept,
        "cuDNN's plan of each shape is kept in the host's memory, 200 KiB each and 10 000 for a thread: up to 2 GiB",
        "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT=1000",
        f"{_PYTORCH}/issues/104701 and {_VARIABLES_DOCS}",
    ),
    LintRule(
        "compiled-again",
        Severity.WARNING,
        _compiled_again,
        "every new shape is compiled anew, and after 8 of them (torch._dynamo.config.recompile_limit) nothing is",
        "dynamic=None or True",
        f"{_DOCS}/compile/programming_model.recompilation.html",
    ),
    LintRule(
        "graphed-shapes",
        Severity.WARNING,
        _graphed,
        "a CUDA graph is recorded for every shape, and its memory is kept for it",
        "mode 'default' or 'max-autotune-no-cudagraphs'",
        f"{_DOCS}/generated/torch.compile.html",
    ),
    LintRule(
        "crowded-cores",
        Severity.WARNING,
        _crowded,
        "threads wait for each other, and each has a stack and an arena of malloc in the host's memory",
        "OMP_NUM_THREADS at most the cores of a process",
        f"{_PYTORCH}/blob/v2.13.0/torch/distributed/run.py",
    ),
    LintRule(
        "unlimited-threads",
        Severity.INFO,
        _unlimited,
        "each process starts as many threads as the machine has cores; torchrun sets 1 for that reason",
        "OMP_NUM_THREADS = cores / processes",
        f"{_PYTORCH}/blob/v2.13.0/torch/distributed/run.py",
    ),
)


__all__ = ["RULES", "LintFinding", "LintRule", "RunFacts", "Severity", "allocator_options", "lint"]

RULES = (*allocator_rules.ALLOCATOR_RULES, *TRAINING_RULES)


def lint(facts: RunFacts) -> tuple[LintFinding, ...]:
    """Return what is wrong, the worst first."""
    seen = ((rule, rule.found(facts)) for rule in RULES)
    findings = [
        LintFinding(rule.code, rule.severity, what, rule.why, rule.remedy, rule.source) for rule, what in seen if what
    ]
    return tuple(sorted(findings, key=lambda finding: tuple(Severity).index(finding.severity)))
