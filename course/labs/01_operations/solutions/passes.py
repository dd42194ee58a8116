"""Lab 1, solved."""

from itertools import pairwise


def declare():
    return {
        "forward_0": ({"params0", "batch"}, {"act1"}),
        "forward_1": ({"params1", "act1"}, {"act2"}),
        "backward_1": ({"act2", "target", "act1", "params1"}, {"grad1", "grad_act1"}),
        "to_host_1": ({"grad1"}, {"slot"}),
        "update_1": ({"slot", "master1"}, {"master1"}),
        "to_device_1": ({"master1"}, {"params1"}),
        "backward_0": ({"grad_act1", "batch"}, {"grad0"}),
        "to_host_0": ({"grad0"}, {"slot"}),
        "update_0": ({"slot", "master0"}, {"master0"}),
        "to_device_0": ({"master0"}, {"params0"}),
    }


def conflict(a, b):
    return bool(a.writes & (b.reads | b.writes) or a.reads & b.writes)


def conflicts(ops):
    return {(i, j) for j in range(len(ops)) for i in range(j) if conflict(ops[i], ops[j])}


def waits(ops, lanes):
    lane_of = {i: name for name, lane in lanes.items() for i in lane}
    pairs = {(i, j) for i, j in conflicts(ops) if lane_of[i] != lane_of[j]}
    return [{i for i, after in pairs if after == j} for j in range(len(ops))]


def races(plan):
    before = [set(some) for some in plan.waits]
    for lane in plan.lanes.values():
        for i, j in pairwise(lane):
            before[j].add(i)

    def ended(j):
        """The set of all operations that have surely ended when operation `j` begins."""
        found, new = set(), set(before[j])
        while new:
            found |= new
            new = set().union(*(before[i] for i in new)) - found
        return found

    sure = [ended(j) for j in range(len(plan.ops))]
    return {(i, j) for i, j in conflicts(plan.ops) if i not in sure[j]}
