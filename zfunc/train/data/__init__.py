"""Data: files become a corpus of tokens, and a position in training becomes a batch.

    corpus     memory-mapped tokens, their sequences, and a rank's batch at a position
    opening    data of any form as a corpus
    token_files  tokens that are mapped where they are
    packing    documents as files of tokens, made once and kept
    encoding   documents as tokens, and which of them are learned
    documents  files of text and of records, and datasets, as documents
    files      which files of a folder are read, and the splits that their names name
    tables     rows of Parquet and Arrow files and of datasets that Hugging Face's `datasets` saved
    formats    JSONL, JSON and CSV, compressed or not
    records    what their keys mean; chats of any usual format as messages
    tokenizer  a local tokenizer.json, with its template of chats, and what of them is learned
    stream     records of an iterable as batches, for a loop of one's own or a training that streams
    record_files  records of JSONL, Parquet and Arrow files, read in training, from a shuffle buffer

A batch of a packed corpus is a pure function of seed and position: nothing is iterated; a resume needs one integer.
"""
