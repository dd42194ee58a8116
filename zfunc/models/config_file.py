"""Where the config of a Hugging Face model is. No torch: a path with a typo is told before a missing package."""

from pathlib import Path
from typing import Any

from zfunc.checkpoint.hf_files import ADAPTER_CONFIG
from zfunc.errors import CheckpointError, refuse, setting

NEXT = "use a folder that save_pretrained or zfunc.hf.save wrote for this config"

# Of a model that is believed: building a larger one would take hours.
MOST_LAYERS, LARGEST_SIZE = 10_000, 1 << 24


def check_config_file(place: Path) -> None:
    """Raise CheckpointError unless `place` is a config.json, or a folder with one."""
    is_file = place.suffix == ".json" and not place.is_dir()
    if is_file and not place.is_file():
        raise CheckpointError(f"{place}: got no such file, expected the config.json of a model")
    if not is_file and not (place / "config.json").is_file():
        raise CheckpointError(
            f"{place}: got no config.json in it, expected a local folder with one: {_advice(place)}"
        )


def check_flags(flags: Any, place: Path, longest: int | None, vocab_size: int) -> None:
    """Raise SettingError if `flags.seq_length` is above `longest` tokens (None: no limit), or
    `flags.vocab_size` is set and not the `vocab_size` of the config file `place`."""
    if longest is not None and flags.seq_length > longest:
        do = f"pass {setting('seq_length', longest)}"
        refuse("seq_length", f"{flags.seq_length} for {place}", f"at most the {longest} positions it has", do)
    if flags.vocab_size not in (None, vocab_size):
        refuse("vocab_size", f"{flags.vocab_size} for {place}", f"its {vocab_size}", "leave it out")


def _advice(folder: Path) -> str:
    """The end of an error's text about a `folder` without a model: what to do, such as a download if the name
    looks like a model's on the Hugging Face Hub."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "it has an adapter alone: name the folder of the model that it adapts"
    if folder.exists():
        return NEXT
    if folder.is_absolute() or len(folder.parts) > 2 or ".." in folder.parts:
        return "there is no such folder: check the path"
    return (
        "there is no such folder. If it is a model on the Hugging Face Hub, download it first: "
        f"hf download {folder} --local-dir {folder.name}, then name the folder {folder.name}"
    )
