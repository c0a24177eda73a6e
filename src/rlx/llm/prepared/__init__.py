"""Prepared files: a language model as one `.rlx` file, with programs, weights, tokenizer and settings."""
