"""Models as segments.

    gpt             GPT-2: its modules and segments
    gpt_config      the size of a GPT-2, without torch
    gpt_costs       what the segments of a GPT-2 cost, without torch: `gpt2.toml` has the operations of their passes
    quantization    frozen weights in 4 or 8 bits (public as `zfunc.quantized`)
    sequences       several documents in one, and the keys and values of past tokens
    loss            next-token loss: ignored labels, and weights that make the mean exact over parts of a batch
    loss_pieces     how many logits exist at once, without torch
    config_file     where a model of Hugging Face has its config, without torch
    cut             any module, cut between its blocks (public as `zfunc.segments`)
    hf              models of Hugging Face transformers, cut at their layers (public as `zfunc.hf`)

A new Hugging Face model: its class in `hf/families.py`, or nothing, if comparing it when it is cut is enough.
"""
