import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.rnn_type, self.nlayers, self.nhid = rnn_type, nlayers, nhid
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(ntoken, ninp)
        if rnn_type in ("LSTM", "GRU"):
            self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        else:
            self.rnn = nn.RNN(ninp, nhid, nlayers, nonlinearity=rnn_type[4:].lower(), dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            if nhid != ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)), dim=-1), hidden

    def init_hidden(self, bsz):
        zeros = next(self.parameters()).new_zeros(self.nlayers, bsz, self.nhid)
        return (zeros, zeros) if self.rnn_type == "LSTM" else zeros


class TransformerModel(nn.Module):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout=0.5):
        super().__init__()
        self.ninp, self.drop, self.input_emb = ninp, nn.Dropout(dropout), nn.Embedding(ntoken, ninp)
        layer = nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout)
        self.encoder = nn.TransformerEncoder(layer, nlayers, enable_nested_tensor=False)
        self.decoder = nn.Linear(ninp, ntoken)
        place = torch.arange(5000).unsqueeze(1) * torch.exp(torch.arange(0, ninp, 2) * (-math.log(10000.0) / ninp))
        self.register_buffer("pe", torch.stack([place.sin(), place.cos()], 2).view(5000, 1, ninp))
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)

    def forward(self, src):
        mask = torch.full((len(src), len(src)), float("-inf"), device=src.device).triu(1)
        x = self.drop(self.input_emb(src) * math.sqrt(self.ninp) + self.pe[: len(src)])
        return F.log_softmax(self.decoder(self.encoder(x, mask=mask)), dim=-1)
