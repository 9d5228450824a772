"""Words that people bring from other tools, and what they are called here."""

from __future__ import annotations

_NOTHING = "nothing to set"
_ANSWERS = {  # what it is here → words of other tools
    "train.effective_batch: items of a step, over all GPUs; how many fit a GPU at once is planned": (
        "batch_size train_batch_size global_batch_size total_batch_size bs"
    ),
    "train.micro_batch: auto plans it; a number is the most items of a GPU at once": (
        "micro_batch_size per_device_train_batch_size per_gpu_batch_size batch_size_per_gpu"
    ),
    f"{_NOTHING}: train.effective_batch is kept exactly, in as many micro-batches as memory wants": (
        "gradient_accumulation_steps accumulate_grad_batches accumulation_steps accumulation grad_accum"
    ),
    "train.threads, which read batches, and train.slots, the batches that they read ahead": (
        "num_workers dataloader_num_workers n_workers workers prefetch prefetch_factor prefetch_batches"
    ),
    "train.pin: true, false or auto": "pin_memory dataloader_pin_memory",
    "train.learning_rate": "lr base_lr max_lr",
    "train.weight_decay": "wd",
    'train.validation.every: epochs (2), a part of one (0.25) or "500 steps"': (
        "val_check_interval check_val_every_n_epoch eval_steps eval_every eval_interval"
    ),
    "train.validation.limit: items, or a part of them": "limit_val_batches eval_batches",
    "train.validation.patience: validations without a better one": "early_stopping early_stopping_patience",
    "train.epochs": "max_epochs num_epochs n_epochs num_train_epochs max_steps",
    "train.clip: the norm of all gradients at most": "gradient_clip_val max_grad_norm grad_clip clip_grad_norm",
    "train.schedule.warmup: steps": "warmup_steps num_warmup_steps warmup",
    "train.schedule.kind: constant, linear or cosine": "lr_scheduler lr_scheduler_type scheduler",
    "train.precision: fp32, bf16, fp16 or auto": (
        "amp use_amp mixed_precision train_precision autocast fp16 bf16 half"
    ),
    "train.checkpointing: true, false, or auto, where memory needs it": (
        "gradient_checkpointing activation_checkpointing use_checkpoint use_checkpointing"
    ),
    "train.offload: true, false, or auto, where memory needs it": "cpu_offload activation_offload",
    "train.sharding: true, false or auto (FSDP2)": "fsdp deepspeed zero_stage strategy model_parallel tensor_parallel",
    "train.ema: the decay, such as 0.999": "ema_decay use_ema",
    "train.frozen: how the names of these parameters begin": "freeze freeze_layers frozen_layers freeze_encoder",
    "train.checkpoints.best, and train.checkpoints.last": "save_top_k save_total_limit",
    "train.checkpoints.every: steps; or train.checkpoints.minutes": (
        "save_steps every_n_train_steps checkpoint_interval"
    ),
    f"{_NOTHING}: a training goes on from its newest checkpoint; train.pretrained begins with other weights": (
        "resume resume_from_checkpoint ckpt_path load_checkpoint"
    ),
    "train.models: a folder for each training": "output_dir default_root_dir save_dir checkpoint_dir",
    "train.trackers: [wandb], [tensorboard] or both": "wandb tensorboard logger use_wandb",
    "train.log_every: steps": "log_every_n_steps logging_steps log_interval",
    "train.seed": "seed_everything random_seed",
    "train.nan: stop, skip or rollback; `pipeline replay` finds the operation": "detect_anomaly",
    "train.compile: true or false; and train.compile_mode": "use_compile torch_compile",
    "train.empty_cache_every: micro-batches; it slows down and helps little": "empty_cache_frequency empty_cache",
    "train.memory_fraction: a smaller one only ends earlier": "per_process_memory_fraction gpu_memory_fraction",
    "train.allocator: auto chooses the settings with which less is held": (
        "expandable_segments max_split_size_mb pytorch_cuda_alloc_conf"
    ),
    f"{_NOTHING}: items are read from disk, train.slots batches at a time": "in_mem in_memory load_in_memory",
    "data.limit: items, for a trial": "max_samples limit_train_batches subset",
    "data.options.max_peaks and train.options.max_peaks": "max_peaks max_peaks_n",
    "graph.cache: true or false": "no_graph_cache cache_graphs",
    "graph.neighbours": "knn k k_neighbors num_neighbors neighbors",
    "graph.radius: Å between CA atoms": "cutoff",
    "cache.root": "cache_dir",
    "embed.batch.cap: sequences at once; or embed.batch.budget: tokens": (
        "esm_batch esm_batch_size toks_per_batch max_tokens"
    ),
    "embed.weights: a file, which `pipeline weights fetch` brings": "esm_model esm_checkpoint",
    "cluster.train.gpus: on each node; and cluster.train.nodes": (
        "devices num_gpus n_gpus num_devices num_nodes n_nodes"
    ),
    "cluster.train.time, and so for each stage": "walltime time_limit",
    "cluster.train.mem: auto plans it; and so for each stage": "mem_per_cpu mem_gb",
}
_OF_TASKS = (
    "layers", "num_layers", "hidden_dim", "width", "dropout", "hidden_irreps", "output_dim", "use_multi_hop",
    "use_nonbonded", "use_layer_norm", "use_gate", "d_fourier", "d_peak", "bin_size", "max_mz",
)  # fmt: skip
FAMILIAR = {word: answer for answer, words in _ANSWERS.items() for word in words.split()} | {
    word: f"train.options.{word}, where the task's class takes it" for word in _OF_TASKS
}


def familiar(word: str) -> str:
    """Return, as the end of a sentence, what a word of other tools is here; empty for a word that is not known."""
    answer = FAMILIAR.get(word.lower().lstrip("-").replace("-", "_"), "")
    return f"here {'there is' if answer.startswith(_NOTHING) else 'it is'} {answer}" if answer else ""
