"""Data: files become a corpus of tokens, and a position in training becomes a batch.

    corpus          a memory-mapped file of tokens, and the batch at a position
    document_rows   sequences of whole documents
    batches         a rank's rows of it
    documents       text, JSONL and JSON records
    chat            chats as text, and what of them is learned
    arrow_dataset   folders that Hugging Face datasets wrote
    tokenizer       a local tokenizer.json
    packing         documents as one file of tokens, made once and kept

A batch is a pure function of seed and position: nothing is iterated, so a resume needs one integer.
"""
