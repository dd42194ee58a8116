"""Names of the files in which transformers and peft keep weights in a folder, without torch."""

SINGLE = "model.safetensors"  # all weights of a model
SHARDS = "model-*-of-*.safetensors"  # a pattern of several files
INDEX = f"{SINGLE}.index.json"  # names the shards
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
