"""Language models on RLX and on its peers; bench/llm.py is the command."""
