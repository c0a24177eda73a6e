"""rlx explain: the kernels of a program, why ops were fused, and where its memory goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.chat import activations_option, kv_option
from rlx.cli.inputs import check_symbols, sizes_of, workable_sizes
from rlx.cli.model import MODEL_HELP, compile_options, open_model
from rlx.cli.output import human_bytes, json_option, print_json, print_line, print_table, progress
from rlx.errors import UnsupportedError
from rlx.llm.memory import memory_of
from rlx.llm.source import is_language_model, open_source
from rlx.plan.predict import costs_of_steps
from rlx.runtime.listing import Listing
from rlx.target.cpu import host

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@compile_options
@click.option(
    "--bind", "-b", multiple=True, metavar="NAME=SIZE", help="Size for which to show times and memory."
)
@activations_option
@kv_option
@click.option(
    "--measure", is_flag=True, help="Time every kernel, and both sides of the largest fusion decisions."
)
@click.option("--asm", metavar="KERNEL", help="Print the assembly of one kernel, like %4, and nothing else.")
@json_option
def explain(
    model: str,
    bind: tuple[str, ...],
    activations: str | None,
    kv: str | None,
    measure: bool,
    asm: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the kernels of MODEL with their predicted costs, the fusion decisions and the memory plan.

    For a language model (a GGUF file, a folder with config.json, or what rlx compile made of one) show the
    memory that it needs. The header of its file says so; nothing is loaded.
    """
    sizes = sizes_of(bind)
    if is_language_model(model):
        _explain_language_model(model, activations, kv, as_json)
        return
    program = open_model(model, **options)
    if asm is not None:
        _print_assembly(program, asm, as_json)
        return
    check_symbols(sizes, program.lir.dynamic_symbols())
    binding = workable_sizes(program, sizes)
    if not as_json:
        print_line(program.explain(measure, binding))
        return
    print_json(
        {
            "name": program.graph.name,
            "target": program.lir.target,
            "host": host().name,
            "stats": program.stats,
            "binding": dict(binding),
            "memory": program.memory(binding),
            "kernels": _kernels(program, binding),
            "decisions": [d.to_json() for d in program.decisions],
            "notes": program.notes,
        }
    )


_MULTIPLIED = {
    "f32": "Weights of 4 to 8 bits are multiplied by activations in f32.",
    "i8": "Weights of 4 to 8 bits are multiplied by activations rounded to 8 bits.",
}


def _explain_language_model(model: str, activations: str | None, kv: str | None, as_json: bool) -> None:
    with progress(f"planning {model}"):
        source = open_source(model).rounded(activations, kv)
        needs = memory_of(source)
    config = source.config
    if as_json:
        about = {"architecture": config.architecture, "layers": config.layers}
        print_json({**about, "activation_dtype": config.activations, "kv_dtype": config.kv, **needs})
        return
    print_line(
        f"{source.path.name}: {config.architecture}, {config.layers} layers of {config.width}, "
        f"{config.heads} heads ({config.kv_heads} of keys and values)\n",
        bold=True,
    )
    read = "text" if config.is_encoder else "prompt"
    last = ("", human_bytes(needs["activations_of_one_token"]), "for each token of an answer")
    print_table(
        ("what", "bytes", "when"),
        [
            ("weights in the file", human_bytes(needs["file"]), "mapped, read once"),
            ("weights in memory", human_bytes(needs["weights"]), "as kernels read them"),
            ("keys and values", human_bytes(needs["kv_per_1000_tokens"]), "for each 1,000 tokens"),
            ("", human_bytes(needs["kv"]), f"for a context of {needs['context']} tokens"),
            (
                "activations",
                human_bytes(needs["activations"]),
                f"while {needs['tokens_at_once']} tokens of a {read} are read",
            ),
            *([] if config.is_encoder else [last]),
        ],
        right=("bytes",),
    )
    print_line(f"\n{_MULTIPLIED[config.activations]}")


def _print_assembly(program: CompiledProgram, kernel: str, as_json: bool) -> None:
    """The assembly of a kernel, or of all kernels of a loop."""
    if "device" in program.stats:
        raise UnsupportedError("--asm is for device 'cpu' only; leave out --device")
    listing = Listing(program.lir)
    texts = {name: listing.assembly(name) for name in listing.find(kernel)}
    if as_json:
        print_json(texts)
    else:
        print_line("\n".join(texts.values()))


def _kernels(program: CompiledProgram, binding: Mapping[str, int]) -> list[dict[str, object]]:
    """Every step of the program, with what it is predicted to take and to move at these sizes."""
    thunks = program.kernels.thunks
    kernels = []
    for id, costs in costs_of_steps(program.lir.specialize(binding), thunks).items():
        node = program.graph.nodes[id]
        kernels.append(
            {
                "node": id,
                "kernel": program.describe(node),
                "type": str(node.type),
                "where": list(node.where),
                "predicted_ns": sum(cost.picoseconds for cost in costs) / 1e3,
                "bytes": sum(cost.io.device_traffic_bytes for cost in costs),
                "operations": sum(cost.operations for cost in costs),
                "on_host_because": thunks[id].why if id in thunks else None,
            }
        )
    return kernels
