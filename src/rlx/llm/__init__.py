"""Language models from GGUF files and Hugging Face folders."""
