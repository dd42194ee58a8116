"""Models of Hugging Face transformers as segments: cut, loaded from a folder, saved to one.

    config, segments = zfunc.hf.load("a-local-folder")          # or segments(model), for a model on any device
    program = zfunc.compile(segments, ...)
    state = zfunc.init(program)                                 # reads the weights, a segment at a time
    state, _ = zfunc.train_step(program, state, zfunc.hf.batch(input_ids, labels))
    zfunc.hf.save("a-new-folder", program, state, config="a-local-folder")

`describe("config.json")` makes the segments of a model without its weights, for `zfunc.plan`.
Parameters have the same names in the model, in programs and in checkpoints. A model may have LoRA adapters of peft:
`segments(peft_model)`, or `lora=peft.LoraConfig(...)` or `lora_config(rank)` to `load`, `save` and `export`.
transformers and peft are imported when one of these is called: `pip install -e ".[hf]"`, or `".[lora]"`.

    families     which models there are, and what is refused
    cutting      `segments`: a model cut at its layers
    comparison   other models with their segments, by numbers
    recording    what flows between layers
    parts        the modules of segments: the model's own forward, with everything else skipped
    attention    attention and masks that depend on shapes alone
    rotary       rotary positions whose frequencies follow the length of a row
    adapters     LoRA by peft
    experts      mixtures of experts, and the loss of their routers
    loading      weights read from a folder, and the groups of a Trainer's optimizer
    bitsandbytes weights in 4 or 8 bits in a folder
    folders      weights written to a folder, or handed to an inference engine
"""

from zfunc.models.hf.adapters import lora_config
from zfunc.models.hf.cutting import cut_model as segments
from zfunc.models.hf.folders import export_folder as export
from zfunc.models.hf.folders import model_weights as weights
from zfunc.models.hf.folders import save_folder as save
from zfunc.models.hf.loading import describe, trainer_groups
from zfunc.models.hf.loading import load_folder as load
from zfunc.models.loss import weighted_batch as batch

__all__ = [
    "batch",
    "describe",
    "export",
    "load",
    "lora_config",
    "save",
    "segments",
    "trainer_groups",
    "weights",
]
