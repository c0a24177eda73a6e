"""Language models from GGUF files and Hugging Face folders.

model = rlx.llm.load("zoo:smollm2")
print(model.chat("What is the capital of France?"))
"""

from __future__ import annotations

from rlx.llm.batching.sequence import Generation, Piece, Request
from rlx.llm.engine import Engine, QueueFull
from rlx.llm.model import LanguageModel, load
from rlx.llm.sample import Sampling

__all__ = ["Engine", "Generation", "LanguageModel", "Piece", "QueueFull", "Request", "Sampling", "load"]
