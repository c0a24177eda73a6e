"""A language model behind HTTP, as OpenAI's clients expect it: `rlx serve MODEL`.

engine = rlx.llm.Engine("zoo:smollm2")
rlx.serve.Server(engine, port=8000).run()
"""

from __future__ import annotations

from rlx.serve.keys import Keys, read_keys
from rlx.serve.server import Server

__all__ = ["Keys", "Server", "read_keys"]
