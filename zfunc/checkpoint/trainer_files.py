"""Checkpoints of transformers' Trainer in whole files: of one process or DDP, of FSDP with FULL_STATE_DICT, and of
adapters of peft, whose base is elsewhere.

The optimizer's file is a pickle, and so are FSDP's weights. `torch.load(weights_only=True)` reads them, and what
else they hold is refused.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from zfunc.checkpoint.durable_files import reject
from zfunc.checkpoint.foreign_run import (
    MOMENTS,
    NEW_MOMENTS,
    ForeignRun,
    ForeignTensor,
    foreign_tensor,
    load_pickle,
    one_step,
    own_name,
    torn,
)
from zfunc.checkpoint.hf_files import ADAPTER, ADAPTER_CONFIG, INDEX, SINGLE
from zfunc.core.display import counted

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")  # of one process or DDP, by number; of FSDP, by name
_WHOLE, _FSDP = "model*.safetensors", "pytorch_model_fsdp.bin"


def is_trainer(folder: Path) -> bool:
    """Whether a folder has the optimizer state of a Hugging Face Trainer in one file, such as optimizer.pt."""
    return any((folder / x).is_file() for x in OPTIMIZERS)


def adapters_in(folder: Path) -> Path | None:
    """`folder` itself if it has adapters of peft, as argument `lora` of `zfunc.hf.load`; else None."""
    return folder if (folder / ADAPTER_CONFIG).is_file() else None


def indexed_shards(folder: Path) -> list[Path]:
    """The paths of the shards of weights that the index in `folder` names, sorted; [] if there is no index, or if
    model.safetensors has all weights. Raises TornError if a shard is missing, or the index cannot be read."""
    if not (index := folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return []
    try:
        names = {Path(x).name for x in json.loads(index.read_bytes())["weight_map"].values()}
        if not names:
            raise LookupError("an empty weight_map")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        got = f"an index that cannot be read ({type(error).__name__}: {error!s:.200})"
        torn(index, got, "the names of all shards", "copy it again")
    files = [folder / x for x in sorted(names)]
    if missing := [x.name for x in files if not x.is_file()]:
        got = f"no {missing[0]}, one of {counted(len(files), 'shard')} that {INDEX} names"
        torn(folder, got, "all of them", "copy or download the rest")
    return files


def open_trainer(
    folder: Path, groups: Sequence[Sequence[str]] = (), *, allow_pickle: bool = False
) -> ForeignRun:
    """Open a checkpoint of Hugging Face's Trainer in a folder such as checkpoint-500. Raises CheckpointError,
    with what to do.

    `groups` are the names of the trained parameters in each group of the optimizer, in its order: the saved
    optimizer state may have numbers in place of names.
    """
    file = next(folder / x for x in OPTIMIZERS if (folder / x).is_file())
    saved = load_pickle(file, allow_pickle=allow_pickle)
    if not _is_state(saved):
        torn(file, "no state of Adam", "what state_dict() of torch's Adam or AdamW returns")
    if any(x.get("amsgrad") for x in saved["param_groups"]):
        reject(file, "AMSGrad", "Adam or AdamW without it", "train on without amsgrad first")
    state = {own_name(x): own for x, own in _by_name(file, saved, groups).items()}
    if (first := next(iter(state.values()), None)) and not any({*own} & {*MOMENTS} for own in state.values()):
        expected = f"{' and '.join(MOMENTS)}, as torch's Adam and AdamW have them"
        reject(file, f"{', '.join(map(str, first))} of a parameter", expected, NEW_MOMENTS)
    moments = {x: {k: foreign_tensor(own[k]) for k in MOMENTS if k in own} for x, own in state.items()}
    step = one_step(folder, ((x, own["step"]) for x, own in state.items() if "step" in own))
    adapters = adapters_in(folder) is not None
    return ForeignRun(folder, step, _weights(folder, adapters, allow_pickle), moments)


def _is_state(saved: Any) -> bool:
    """Whether `saved` has the form of an optimizer's state dict whose moments are tensors."""
    try:
        states, lists = [*saved["state"].values()], [x["params"] for x in saved["param_groups"]]
        moments = [own.get(k) for own in states for k in {*MOMENTS} & {*own.keys()}]
    except (AttributeError, KeyError, TypeError):
        return False
    forms = (states, dict), (lists, list), (moments, Tensor)
    return all(isinstance(x, kind) for values, kind in forms for x in values)


def _by_name(file: Path, saved: Any, groups: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """The saved optimizer state of each parameter, by name; `groups` names parameters that have only a
    number. Raises CheckpointError where it does not fit."""
    state: Mapping[Any, Any] = saved["state"]
    if all(isinstance(x, str) for x in state):
        return state
    numbers: list[list[int]] = [x["params"] for x in saved["param_groups"]]
    sizes, known = [*map(len, numbers)], [*map(len, groups)]
    if not groups:
        got, do = "states by the number of a parameter", "name the model that training began with, as `hf`"
        reject(file, got, "the names of parameters in the optimizer's order", do)
    if sizes != known:
        do = "name the model, and an optimizer that the Trainer made"
        reject(file, f"groups of {sizes} parameters", f"{known}, as the Trainer makes of the model", do)
    pairs = zip(chain(*numbers), chain(*groups), strict=True)
    return {name: state[n] for n, name in pairs if n in state}


def _weights(folder: Path, adapters: bool, allow_pickle: bool) -> dict[str, ForeignTensor]:
    files = sorted(folder.glob(ADAPTER if adapters else _WHOLE))
    files = files if adapters else indexed_shards(folder) or files
    if not files and not adapters and (folder / _FSDP).is_file():
        saved = load_pickle(folder / _FSDP, allow_pickle=allow_pickle)
        named: Any = saved.items() if hasattr(saved, "items") else ()
        return {own_name(x): foreign_tensor(t) for x, t in named if isinstance(t, Tensor)}
    if not files:
        do = "copy it there; of pickled weights let save_pretrained write it"
        reject(folder, "no weights", ADAPTER if adapters else SINGLE, do)
    from safetensors import SafetensorError

    load_file: Any = import_module("safetensors.torch").load_file
    found: dict[str, ForeignTensor] = {}
    for file in files:
        try:
            found |= {own_name(x): foreign_tensor(t) for x, t in load_file(file).items()}  # mapped, not read
        except (SafetensorError, OSError) as error:
            torn(file, f"a file that cannot be read ({error!s:.200})", "a whole one")
    return found
