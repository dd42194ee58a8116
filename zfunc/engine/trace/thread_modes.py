"""Modes of the calling thread that training refuses: other threads do not have them, or a trace would keep them."""

import torch

from zfunc.errors import refuse, setting


def refuse_inference_mode(action: str) -> None:
    """Raise RuntimeError in inference mode: tensors allocated there cannot be written outside of it."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{action}: got inference mode, expected it off: training writes into what is made here. Call it "
            "outside of torch.inference_mode()"
        )


def refuse_global_modes(action: str, device: torch.device) -> None:
    """Raise RuntimeError under autocast or anomaly detection, modes of the calling thread alone, which threads of
    other lanes do not have and which a trace would keep; and in a function that torch.compile traces."""
    if torch.compiler.is_dynamo_compiling():  # is_compiling() is true in a cut of another thread, too
        _refuse_to_be_compiled(action)
    for kind in dict.fromkeys(("cpu", device.type)):
        if torch.is_autocast_enabled(kind):
            do = "pass `precision` to zfunc.compile, which holds for every operation of the step"
            refuse(action, f"autocast for {kind!r}", "it off", do, RuntimeError)
    if torch.is_anomaly_enabled():
        raise RuntimeError(
            f"{action}: got anomaly detection, expected it off: pass debug=True to train_step, which names the "
            "operation of an error"
        )


def _refuse_to_be_compiled(action: str) -> None:
    do = f"leave torch.compile out, and pass {setting('compile_segments', True)} to zfunc.compile"
    refuse(action, "a call inside torch.compile", "one outside", do, RuntimeError)


# As torch.compiler.disable does, whose import of Dynamo takes a second. Dynamo calls this function and does not
# trace it: after an error in code that it traces, Dynamo runs that code untraced, where nothing is compiling.
_refuse_to_be_compiled._torchdynamo_disable = True  # pyright: ignore
