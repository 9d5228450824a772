# Trains a small GPT on characters:   python train.py config/tiny.py --batch_size=32   (or --init_from=resume)
import math
import os
import pickle
import time
from contextlib import nullcontext

import numpy as np
import torch

from model import GPT

# ---------------- settings, all of which a file or --key=value may override ----------------
out_dir = "out"
eval_interval = 250
log_interval = 10
eval_iters = 100
always_save_checkpoint = False  # else only where the validation loss fell
init_from = "scratch"  # or 'resume'
dataset = "chars"
gradient_accumulation_steps = 4
batch_size = 16  # of a micro step
block_size = 64
n_layer, n_head, n_embd, dropout = 2, 2, 64, 0.1
learning_rate = 1e-3
max_iters = 2000
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.99, 1.0
warmup_iters, lr_decay_iters, min_lr = 20, 2000, 1e-4
device, dtype, compile = "cuda", "bfloat16", True
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open("configurator.py").read())
config = {k: globals()[k] for k in config_keys}
# --------------------------------------------------------------------------------------------
assert "RANK" not in os.environ, "this copy trains in one process"
print(f"tokens per iteration: {gradient_accumulation_steps * batch_size * block_size:,}")
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
device_type = "cuda" if "cuda" in device else "cpu"
ctx = nullcontext() if device_type == "cpu" else torch.autocast(device_type, getattr(torch, dtype))
data_dir = os.path.join("data", dataset)

def get_batch(split):
    # a new memmap for each batch, else it leaks
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)

iter_num, best_val_loss = 0, 1e9
if init_from == "scratch":
    print("Initializing a new model from scratch")
    with open(os.path.join(data_dir, "meta.pkl"), "rb") as f:
        vocab_size = pickle.load(f)["vocab_size"]
    model_args = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, dropout=dropout)
    model_args["vocab_size"] = vocab_size
    model = GPT(**model_args)
elif init_from == "resume":
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model_args = checkpoint["model_args"]
    model = GPT(**model_args)
    model.load_state_dict(checkpoint["model"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (beta1, beta2), weight_decay=weight_decay)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
raw_model, model = model, torch.compile(model) if compile else model

@torch.no_grad()
def estimate_loss():
    model.eval()
    means = {}
    for split in ("train", "val"):
        means[split] = torch.stack([model(*get_batch(split))[1] for _ in range(eval_iters)]).mean().item()
    model.train()
    return means

def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")
t0 = time.time()
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = dict(model=raw_model.state_dict(), optimizer=optimizer.state_dict(), config=config)
                checkpoint |= dict(model_args=model_args, iter_num=iter_num, best_val_loss=best_val_loss)
                print(f"saving checkpoint to {out_dir}")
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for _ in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, time {time.time() - t0:.2f}s")
    t0 = time.time()
    iter_num += 1
    if iter_num > max_iters:
        break
