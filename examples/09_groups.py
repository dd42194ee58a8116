# # 9. Several optimizers in one model
#
# Run it with `python examples/09_groups.py`.
#
# A rule says which parameters an optimizer has: a glob over their names, or a function of name and shape. The first
# rule that matches decides, and the last optimizer has the rest.

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc

torch.set_num_threads(1)  # the tensors here are small
WIDTH, ROWS, LAYERS = 64, 256, 3


class Loss(nn.Linear):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), targets)


torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
pieces = {**{f"layer{n}": x for n, x in enumerate(layers)}, "head": Loss(WIDTH, 10)}
segments = [zfunc.segment(name, module) for name, module in pieces.items()]
batch = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 10


def train(optimizer: object, steps: int = 30) -> tuple[dict[str, Tensor], float, float]:
    program = zfunc.compile(segments, optimizer=optimizer, precision="bf16", bucket_size=10_000, device="cpu")
    state, losses = zfunc.init(program, seed=0), []
    for _ in range(steps):
        state, metrics = zfunc.train_step(program, state, batch)
        losses.append(metrics.loss)
    for bucket in program.layout.buckets:
        first, last = bucket.spans[0].name, bucket.spans[-1].name
        print(f"bucket {bucket.index}  {bucket.state_format:10}  {first} to {last}")
    return zfunc.params(program, state), losses[0], losses[-1]


# ## The head against the rest
#
# The backbone keeps what it knows: with a learning rate of 0 it does not move at all. Groups of one optimizer have
# state of one format, so they share buckets.

start = {f"{name}.{x}": value.detach() for name, m in pieces.items() for x, value in m.named_parameters()}
weights, first, last = train(zfunc.groups(("head.*", zfunc.AdamW(1e-2)), zfunc.AdamW(0.0)))
moved = [name for name, x in weights.items() if not torch.equal(x, start[name])]
print(f"only the head: first loss {first:.3f}  last {last:.3f}, moved: {', '.join(moved)}\n")

# ## A rate that falls from layer to layer

rate = zfunc.lr.warmup_cosine(1e-2, warmup=5, total=30)
by_layer = [(f"layer{n}.*", zfunc.AdamW(zfunc.lr.scaled(rate, 0.8 ** (LAYERS - n)))) for n in range(LAYERS)]
optimizer = zfunc.groups(*by_layer, zfunc.AdamW(rate))
factors = optimizer.factors(5)
print("rates at step 5:", " ".join(f"{factors[f'{n}.lr']:.4f}" for n in range(LAYERS + 1)))
_, first, last = train(optimizer)
print(f"layer by layer: first loss {first:.3f}  last {last:.3f}\n")

# ## Lion for matrices, SGD for vectors
#
# Their state differs, so no bucket has both. A segment begins with the kind that the one before ended with, which
# keeps the buckets few.

lion, sgd = zfunc.Lion(1e-3, moments="16bit"), zfunc.SGD(1e-2, momentum=0.9, moments="16bit")
_, first, last = train(zfunc.groups((zfunc.matrices_only, lion), sgd))
print(f"two optimizers: first loss {first:.3f}  last {last:.3f}")
