"""Data: files become a corpus of tokens, and a position in training becomes a batch.

corpus, batches             one memory map and its windows; the rows of a rank
documents, arrow_dataset    text, JSONL and JSON records; folders that Hugging Face datasets wrote
tokenizer                   a local tokenizer.json
packing                     documents as one file of tokens, made once and kept
"""
