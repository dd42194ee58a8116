"""A training step of two layers of one weight each, as ten operations on a memory. Read it for `declare`.

`memory` is a dict of numbers, and its keys are the regions. The device computes; the host has the master weights
and updates them. Gradients leave the device through one slot, which the layers share.
"""

RATE = 0.1


def forward_0(memory):
    memory["act1"] = memory["params0"] * memory["batch"]


def forward_1(memory):
    memory["act2"] = memory["params1"] * memory["act1"]


def backward_1(memory):
    above = memory["act2"] - memory["target"]
    memory["grad1"] = above * memory["act1"]
    memory["grad_act1"] = above * memory["params1"]


def to_host_1(memory):
    memory["slot"] = memory["grad1"]


def update_1(memory):
    memory["master1"] -= RATE * memory["slot"]


def to_device_1(memory):
    memory["params1"] = memory["master1"]


def backward_0(memory):
    memory["grad0"] = memory["grad_act1"] * memory["batch"]


def to_host_0(memory):
    memory["slot"] = memory["grad0"]


def update_0(memory):
    memory["master0"] -= RATE * memory["slot"]


def to_device_0(memory):
    memory["params0"] = memory["master0"]


STEP = [
    *(forward_0, forward_1),
    *(backward_1, to_host_1, update_1, to_device_1),
    *(backward_0, to_host_0, update_0, to_device_0),
]
LANES = {
    "compute": [0, 1, 2, 6],
    "d2h": [3, 7],
    "host": [4, 8],
    "h2d": [5, 9],
}
