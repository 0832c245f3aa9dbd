"""The files of a folder of tokens."""

FORMAT = "paceline-tokens-1"
META = "tokens.json"  # dtype, number of tokens, documents and vocabulary
TOKENS = "tokens.bin"  # of all documents, one after another
DOCUMENTS = "documents.bin"  # the position after each document, uint64
TOKENIZER = "tokenizer.json"  # a copy of that which was used
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
