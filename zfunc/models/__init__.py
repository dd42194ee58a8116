"""Models as segments.

    gpt, kv_cache               GPT-2 in pieces; keys and values of past tokens, for sampling
    loss                        next-token loss, with labels that do not count and weights that make batches exact
    hf                          causal models of Hugging Face transformers (public as `zfunc.hf`)

A new family of Hugging Face models: one row in `hf/families.py`.
"""
