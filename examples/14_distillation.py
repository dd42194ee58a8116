# # 14. A student and its teacher
#
# Run it with `python examples/14_distillation.py`.
#
# A small model learns from the probabilities of a large one, which is frozen. The teacher is a program of its own,
# so it has a place of its own: here its parameters stay on the host, and `zfunc.apply` streams them through the
# device, a segment at a time. Frozen parameters have no optimizer state; a program has to have one that is not
# frozen, which nobody trains here.

import torch
from torch.nn import functional as F

import zfunc
from zfunc.models.gpt import modules
from zfunc.models.gpt_config import GPTConfig

torch.set_num_threads(1)  # the tensors here are small
torch.manual_seed(0)
TEMPERATURE = 2.0
of_both = {"vocab_size": 64, "seq_length": 16, "num_attention_heads": 2, "tied": False}
small, large = (GPTConfig(num_layers=n, hidden_size=32 * n, **of_both) for n in (1, 4))

# ## The teacher

known = modules(large)
for _, module in known:
    module.requires_grad_(False)
known[-1][1].ln_f.bias.requires_grad_(True)
teacher = zfunc.compile([zfunc.segment(name, m) for name, m in known], precision="fp32", params_on="host")
knowing = zfunc.init(teacher, seed=1)

# ## The student
#
# Its loss is a function of its logits and the teacher's: KL divergence of softened probabilities (Hinton et al.
# 2015), a mean over tokens.


class Head(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x, logits=None):
        own = self.head.logits(x)
        if logits is None:
            return own
        p, q = ((y / TEMPERATURE).log_softmax(-1).flatten(0, 1) for y in (logits, own))
        return TEMPERATURE**2 * F.kl_div(q, p, reduction="batchmean", log_target=True)


parts = [(name, Head(m) if name == "head" else m) for name, m in modules(small)]
student = zfunc.compile(
    [zfunc.segment(name, m) for name, m in parts], optimizer=zfunc.AdamW(lr=1e-2), precision="fp32"
)
state = zfunc.init(student)
for step in range(1, 41):
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step % 4))
    state, metrics = zfunc.train_step(student, state, (ids, zfunc.apply(teacher, knowing, ids)))
    if step in (1, 40):
        print(f"step {step:2}: KL {metrics.loss:.4f}")
