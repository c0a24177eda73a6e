"""What is measured, by name: `gemm:128,384,1536` is one workload, `minilm` a suite of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.errors import ConfigError
from rlx_bench.workloads import convolutions, further, models, products, rows, trained, training
from rlx_bench.workloads.base import Workload

MAKERS: dict[str, Callable[..., Workload]] = {
    "gemm": products.gemm,
    "int8": products.int8,
    "int8-conv": convolutions.int8_conv,
    "int8-bottlenecks": convolutions.int8_bottlenecks,
    "nbits": products.nbits,
    "chain": rows.chain,
    "softmax": rows.softmax,
    "layernorm": rows.layernorm,
    "attention": rows.attention,
    "minilm": models.minilm,
    "minilm-bf16": models.minilm_bf16,
    "resnet50-bf16": models.resnet50_bf16,
    "minilm-dynamic": models.minilm_dynamic,
    "resnet50": models.resnet50,
    "gpt2-prefill": models.gpt2_prefill,
    "gpt2-decode": models.gpt2_decode,
    "lstm": models.lstm,
    "whisper": models.whisper,
    "run-mlp": models.mlp_by_run,
    "run-minilm": models.minilm_by_run,
    "run-softmax": rows.softmax_by_run,
    "train-mlp": training.mlp,
    "train-transformer": training.transformer_block,
    **trained.MAKERS,
    **further.MAKERS,
}


def _sizes(*values: int) -> str:
    return ",".join(map(str, values))


SUITES: dict[str, tuple[str, ...]] = {
    "quick": ("minilm:1,16", "minilm:1,128", "gemm:128,384,1536", "softmax:1024,1024", "layernorm:1024,1024"),
    "gemm": tuple(f"gemm:{_sizes(*shape)}" for shape in products.SWEEP),
    "elementwise": ("chain:4096,4096", "softmax:4096,4096", "layernorm:4096,4096"),
    "attention": ("attention:12,128,32", "attention:12,512,64", "attention:12,512,64,1"),
    "minilm": ("minilm:1,16", "minilm:1,128", "minilm:32,128", "minilm-dynamic:"),
    "bf16": ("minilm-bf16:1,128", "minilm-bf16:32,128", "resnet50-bf16:1"),
    "models": (
        "resnet50:1",
        "gpt2-prefill:128",
        "gpt2-decode:128",
        "lstm:128,1,256,256",
        "whisper:0",
        "whisper:1",
    ),
    "quant": (
        "int8:128,384,1536",
        "int8:128,1024,1024",
        "int8-conv:64,56",
        "int8-bottlenecks:3,256,56",
        "nbits:8,1,4096,4096",
        "nbits:4,1,4096,4096",
    ),
    "run": ("run-mlp:", "run-minilm:1,16", "run-softmax:4096,4096"),
    "zoo": tuple(f"{name}:" for name in trained.MAKERS),
    "networks": tuple(f"{name}:" for name in further.MAKERS),
    "training": ("train-mlp:128", "train-transformer:8,128,256,4"),
}
SUITES["all"] = tuple(
    spec for name, specs in SUITES.items() if name not in ("quick", "gemm") for spec in specs
)


def check_name(spec: str) -> None:
    """Refuse a workload that does not exist, before anything is measured."""
    name = spec.partition(":")[0]
    if name not in MAKERS:
        suites = ", ".join(SUITES)
        raise ConfigError(f"unknown workload {name!r}; workloads: {', '.join(MAKERS)}; suites: {suites}")


def models_named(names: Sequence[str], small: bool = False) -> dict[str, str]:
    """Trained models of the zoo and networks as workloads, by name; "zoo" and "networks" are all of a kind.

    >>> models_named(["magika", "vit-b16"], small=True)
    {'magika': 'zoo-magika:', 'vit-b16': 'net-vit-b16:1'}
    """
    zoo = {name.removeprefix("zoo-"): f"{name}:" for name in trained.MAKERS}
    networks = {name: f"net-{name}:{'1' if small else ''}" for name in further.NETWORKS}
    kinds, single = {"zoo": zoo, "networks": networks}, zoo | networks
    found: dict[str, str] = {}
    for name in names:
        if name not in kinds and name not in single:
            raise ConfigError(f"unknown model {name!r}; use one of {', '.join((*kinds, *single))}")
        found |= kinds.get(name) or {name: single[name]}
    return found


def specs_named(names: Sequence[str]) -> list[str]:
    """Workloads by the names of models, or by their own.

    >>> specs_named(["magika", "gemm:2,3,4"])
    ['zoo-magika:', 'gemm:2,3,4']
    """
    found = []
    for name in names:
        if ":" in name:
            check_name(name)
            found.append(name)
        else:
            found += models_named([name]).values()
    return found


def make(spec: str) -> Workload:
    """A workload from its text, for example "gemm:128,384,1536".

    >>> make("gemm:200,300,400").name
    'gemm 200x300x400'
    """
    check_name(spec)
    name, _, sizes = spec.partition(":")
    try:
        return MAKERS[name](*(int(s) for s in sizes.split(",") if s))
    except (TypeError, ValueError):
        raise ConfigError(f"workload {spec!r} has wrong sizes; write for example gemm:128,384,1536") from None
