"""Models as segments.

    gpt          GPT-2: its modules and segments
    gpt_config   its size, without torch
    kv_cache     keys and values of past tokens, for sampling
    loss         next-token loss: ignored labels, and weights that keep the mean exact over micro-batches and ranks
    loss_pieces  how many logits exist at once, without torch
    hf           causal models of Hugging Face transformers, cut at their decoder layers (public as `zfunc.hf`)

A new family of Hugging Face models: one row in `hf/families.py`.
"""
