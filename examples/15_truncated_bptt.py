# # 15. State that one batch hands to the next
#
# Run it with `python examples/15_truncated_bptt.py`.
#
# Truncated backpropagation through time: a recurrent model reads a long text in windows. Its hidden state goes on
# from one window to the next, its gradient does not. The hidden state is a buffer of the module that forward writes
# in place, so it is part of the State: saved, copied and donated with the rest. A window's gradient ends at the
# buffer, which has none; `detach` says so to plain PyTorch as well.

import copy

import torch
from torch import nn
from torch.nn import functional as F

import zfunc

torch.set_num_threads(1)  # the tensors here are small
torch.manual_seed(0)
ROWS, WINDOW, WIDTH, TEXT = 4, 8, 32, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("hidden", torch.zeros(ROWS, WIDTH))

    def forward(self, window):
        h, outputs = self.hidden.clone(), []
        for x in window.unbind(1):
            h = self.cell(x, h)
            outputs.append(h)
        self.hidden.copy_(h.detach())
        return torch.stack(outputs, 1)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TEXT, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, TEXT)

    def forward(self, tokens, targets):
        logits = self.head(self.layers(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Each row is a text of its own, and a row of one window goes on in the same row of the next. So the batch is one
# micro-batch of one rank: micro-batches read the buffers that the one before wrote, and all ranks get rank 0's.
text = torch.arange(ROWS * 3)[:ROWS, None] + torch.arange(WINDOW * 41 + 1) ** 2 // 7
starts = range(0, WINDOW * 41, WINDOW)
windows = [(text[:, i : i + WINDOW] % TEXT, text[:, i + 1 : i + WINDOW + 1] % TEXT) for i in starts]

# ## Beside plain PyTorch

model = Language()
plain = copy.deepcopy(model)
program = zfunc.compile(
    zfunc.segments(model, windows[0]), optimizer=zfunc.AdamW(lr=1e-2, weight_decay=0.0), precision="fp32"
)
state = zfunc.init(program)
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
furthest = 0.0
for step, (tokens, targets) in enumerate(windows[:-1], 1):
    state, metrics = zfunc.train_step(program, state, (tokens, targets))
    loss = plain(tokens, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    furthest = max(furthest, abs(metrics.loss - loss.item()))
    if step in (1, 40):
        print(f"window {step:2}: loss {metrics.loss:.4f}")
hidden, of_plain = zfunc.buffers(program, state), dict(plain.named_buffers())
print(f"largest difference of a loss below 1e-4: {furthest < 1e-4}")
same = all(torch.allclose(hidden[name], x, atol=1e-4) for name, x in of_plain.items())
print(f"the same hidden states: {same}, of {len(of_plain)} layers in {len(program.segments)} segments")

# ## Where a text ends
#
# `replace` sets a buffer, as a new text needs it. `evaluate` reads the hidden state, and leaves it as it is.

print(f"goes on: {zfunc.evaluate(program, state, windows[-1]):.4f}")
state = zfunc.replace(program, state, {name: torch.zeros_like(x) for name, x in hidden.items()})
print(f"begins: {zfunc.evaluate(program, state, windows[-1]):.4f}")
