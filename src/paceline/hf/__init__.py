"""Models in the format of Hugging Face: a folder as a task, its weights, its tokenizer and its samples."""
