"""Machines as `/proc` and `/sys` tell of them, in a folder."""

from pathlib import Path


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def two_sockets(root: Path) -> Path:
    """Two nodes of four CPUs, which are two cores each: CPU n and n + 4 are hyperthreads of one."""
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}"
        for cpu in range(8)
    }
    nodes = {f"sys/devices/system/node/node{n}/cpulist": x for n, x in enumerate(("0-1,4-5", "2-3,6-7"))}
    return tree(root, {**siblings, **nodes})
