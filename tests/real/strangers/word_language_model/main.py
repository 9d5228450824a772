import argparse
import math
import os
import time

import torch
import torch.nn as nn

from model import RNNModel, TransformerModel

parser = argparse.ArgumentParser(description="RNN/LSTM/GRU/Transformer language model of words")
parser.add_argument("--data", type=str, default="./data/wikitext-2", help="folder of train.txt, valid.txt, test.txt")
parser.add_argument("--model", type=str, default="LSTM", help="RNN_TANH, RNN_RELU, LSTM, GRU or Transformer")
for name, size in {"--emsize": 200, "--nhid": 200, "--nlayers": 2}.items():
    parser.add_argument(name, type=int, default=size)
parser.add_argument("--nhead", type=int, default=2, help="heads of the Transformer")
parser.add_argument("--lr", type=float, default=20)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch_size", type=int, default=20, metavar="N")
parser.add_argument("--bptt", type=int, default=35)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--tied", action="store_true")
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--cuda", action="store_true")
parser.add_argument("--log-interval", type=int, default=200, metavar="N")
parser.add_argument("--save", type=str, default="model.pt")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if args.cuda else "cpu")

class Corpus:
    def __init__(self, path):
        self.word2idx = {}
        files = (os.path.join(path, f"{split}.txt") for split in ("train", "valid", "test"))
        self.train, self.valid, self.test = map(self.tokenize, files)

    def tokenize(self, path):
        with open(path, encoding="utf8") as f:
            words = [word for line in f for word in [*line.split(), "<eos>"]]
        return torch.tensor([self.word2idx.setdefault(word, len(self.word2idx)) for word in words])

corpus = Corpus(args.data)

def batchify(data, bsz):
    # bsz columns of consecutive words; the rest is trimmed
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous().to(device)

eval_batch_size = 10
train_data = batchify(corpus.train, args.batch_size)
val_data, test_data = batchify(corpus.valid, eval_batch_size), batchify(corpus.test, eval_batch_size)
ntokens = len(corpus.word2idx)
if args.model == "Transformer":
    model = TransformerModel(ntokens, args.emsize, args.nhead, args.nhid, args.nlayers, args.dropout).to(device)
else:
    model = RNNModel(args.model, ntokens, args.emsize, args.nhid, args.nlayers, args.dropout, args.tied).to(device)
criterion = nn.NLLLoss()

def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

def batches(source):
    for i in range(0, source.size(0) - 1, args.bptt):
        seq_len = min(args.bptt, len(source) - 1 - i)
        yield source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)

def run(source, bsz, step=None):
    hidden, total = None if args.model == "Transformer" else model.init_hidden(bsz), 0.0
    for number, (data, targets) in enumerate(batches(source)):
        model.zero_grad()
        if hidden is None:
            output = model(data)
        else:
            output, hidden = model(data, repackage_hidden(hidden))
        loss = criterion(output.view(-1, ntokens), targets)
        total += len(data) * loss.item()
        if step:
            step(number, loss)
    return total / (len(source) - 1)

def update(number, loss):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    if number % args.log_interval == 0 and number > 0:
        print(f"| epoch {epoch:3d} | {number:5d} batches | lr {lr:02.2f} | loss {loss.item():5.2f}")

@torch.no_grad()
def evaluate(source):
    model.eval()
    return run(source, eval_batch_size)

lr, best_val_loss = args.lr, None
try:  # Ctrl + C ends the training early
    for epoch in range(1, args.epochs + 1):
        start = time.time()
        model.train()
        run(train_data, args.batch_size, update)
        val_loss = evaluate(val_data)
        print(f"| end of epoch {epoch:3d} | time: {time.time() - start:5.2f}s | valid loss {val_loss:5.2f}")
        if not best_val_loss or val_loss < best_val_loss:
            with open(args.save, "wb") as f:
                torch.save(model, f)
            best_val_loss = val_loss
        else:
            lr /= 4.0
except KeyboardInterrupt:
    print("Exiting from training early")
with open(args.save, "rb") as f:
    model = torch.load(f, weights_only=False)
test_loss = evaluate(test_data)
print(f"| End of training | test loss {test_loss:5.2f} | test ppl {math.exp(test_loss):8.2f}")
