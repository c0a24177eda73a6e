"""A transformer encoder cut over the ranks of a mesh: heads, inner layers and embeddings are split.

    rlx launch -n 2 examples/tensor_parallel.py

Every rank compiles the same graph. `shardings` places weights on the mesh; the compiler finds out what
follows for all other values, inserts the collectives, and says so. Rank 0 checks the result against the whole
program. The weights are random, so that the example runs anywhere; `bench/tensor_parallel.py` uses MiniLM's.
"""

from __future__ import annotations

import numpy as np

import rlx
from rlx.dist import Mesh, init
from rlx.ir.graph import Graph
from rlx.zoo import minilm

CONFIG = {"num_attention_heads": 8, "hidden_size": 256, "layer_norm_eps": 1e-12, "num_hidden_layers": 3}
INNER, WORDS, PLACES = 1024, 5000, 128


def random_encoder(seed: int = 0) -> Graph:
    """A BERT encoder with random weights; every rank makes the same ones."""
    rng = np.random.default_rng(seed)
    hidden = CONFIG["hidden_size"]
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        weights[f"{name}.weight"] = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(
            np.float32
        )
        weights[f"{name}.bias"] = np.zeros(outputs, np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = (
            np.ones(hidden, np.float32),
            np.zeros(hidden, np.float32),
        )

    for kind, rows in (("word", WORDS), ("position", PLACES), ("token_type", 2)):
        weights[f"embeddings.{kind}_embeddings.weight"] = rng.standard_normal((rows, hidden)).astype(
            np.float32
        )
    norm("embeddings.LayerNorm")
    for layer in range(int(CONFIG["num_hidden_layers"])):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{name}.attention.{part}", hidden, hidden)
        linear(f"{name}.intermediate.dense", INNER, hidden)
        linear(f"{name}.output.dense", hidden, INNER)
        norm(f"{name}.attention.output.LayerNorm")
        norm(f"{name}.output.LayerNorm")
    return minilm.build(CONFIG, weights)


def main() -> None:
    transport = init()  # the job that `rlx launch` started
    mesh = Mesh({"tp": transport.num_ranks})
    graph = random_encoder()
    program = rlx.compile(graph, threads=1, mesh=mesh, shardings=minilm.tensor_parallel(graph))

    rng = np.random.default_rng(1)
    inputs = {"input_ids": rng.integers(0, WORDS, (2, 64)), "attention_mask": np.ones((2, 64), np.int64)}
    inputs["attention_mask"][1, 40:] = 0
    outputs = program.run(inputs)  # on all ranks together; every rank gets the whole result

    if transport.this_rank == 0:
        whole = rlx.compile(graph, threads=1)
        wanted = whole.run(inputs)
        worst = max(float(np.abs(outputs[name] - wanted[name]).max()) for name in wanted)
        share = program.stats["weights"] / whole.stats["weights"]
        print(program.explain().partition("\nRanks: ")[2].splitlines()[0])
        print(f"weights of a rank: {share:.0%} of the whole; largest difference {worst:.1e}")
        assert worst < 1e-5


if __name__ == "__main__":
    main()
