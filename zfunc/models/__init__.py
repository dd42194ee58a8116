"""Models as segments.

    gpt        GPT-2: its modules and segments
    kv_cache   keys and values of past tokens, for sampling
    loss       next-token loss: ignored labels, and weights that keep the mean exact over micro-batches and ranks
    hf         causal models of Hugging Face transformers, cut at their decoder layers (public as `zfunc.hf`)

A new family of Hugging Face models: one row in `hf/families.py`.
"""
