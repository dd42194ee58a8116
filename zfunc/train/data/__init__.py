"""Data: files become a corpus of tokens, and a position in training becomes a batch.

    corpus          memory-mapped tokens, and the batch at a position
    document_rows   sequences of whole documents
    batches         a rank's rows of it
    documents       text files, JSONL and JSON records
    chat            chats as text, and what of them is learned
    saved_dataset   folders and Parquet files that Hugging Face datasets reads
    tokenizer       a local tokenizer.json
    packing         data as a corpus; documents as files of tokens, made once and kept

A batch is a pure function of seed and position: nothing is iterated, so a resume needs one integer.
"""
