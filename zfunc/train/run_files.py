"""The names of the files in a run's folder, by which the folder is known."""

from collections.abc import Iterable

CONFIG, PLAN, TRACE = "config.json", "plan.txt", "timeline.json"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"


def files_of_runs(names: Iterable[str]) -> set[str]:
    """Those of `names`, of files below a folder, that are in folders of runs below it.

    >>> sorted(files_of_runs(["a.txt", *(f"runs/1/{x}" for x in (CONFIG, PLAN, METRICS, "checkpoints/latest"))]))
    ['runs/1/checkpoints/latest', 'runs/1/config.json', 'runs/1/metrics.jsonl', 'runs/1/plan.txt']
    """
    every = {*names}
    folders = (x.removesuffix(METRICS) for x in every if x.endswith(f"/{METRICS}"))
    runs = tuple(x for x in folders if {x + CONFIG, x + PLAN} <= every)
    return {x for x in every if x.startswith(runs)}
