"""rlx compile: a model to a .rlx file with plan, native code and weights, or to its plan as text.

That of a language model also has its tokenizer, chat template and settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from rlx.cli.chat import activations_option, context_option, kv_option
from rlx.cli.model import MODEL_HELP, compile_options, open_language_model, open_model
from rlx.cli.output import counted, human_bytes, human_time, json_option, print_json, print_line, progress
from rlx.llm.model import LanguageModel
from rlx.llm.prepared.save import save as save_language_model
from rlx.llm.source import is_language_model
from rlx.plan.files import write_text
from rlx.runtime.store.save import lir_for, save
from rlx.target.cpu import resolve, runs_here


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(dir_okay=False),
    help="File to write; it ends in .rlx or .plan.",
)
@click.option(
    "--also", multiple=True, metavar="TARGET", help="Add code for another CPU target; may be repeated."
)
@compile_options
@activations_option
@kv_option
@context_option
@json_option
def compile(
    model: str,
    output: str,
    also: tuple[str, ...],
    activations: str | None,
    kv: str | None,
    context: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile MODEL and save it as a .rlx file, which loads quickly.

    A .plan file holds the plan as text instead, to read and to compare with rlx diff.

    MODEL may be a language model: a GGUF file, a folder with config.json, or zoo:ID. Its .rlx file holds all
    of it, for rlx chat, serve and explain; --activations, --kv and --context are for it, and fixed then.
    """
    ending = Path(output).suffix
    if ending not in (".rlx", ".plan"):
        raise click.UsageError(
            f"cannot write {output}: its name must end in .rlx (a program) or .plan (the plan as text)"
        )
    as_text = ending == ".plan"
    if as_text and also:
        raise click.UsageError(
            f"{output} holds the plan for one target; leave out --also, or write a .rlx file"
        )
    start = time.perf_counter()
    target: str | None = options.pop("target")
    # Code for another machine cannot be loaded here: it is compiled when the file is written.
    other = target if target is not None and not runs_here(resolve(target)) else None
    here = None if other else target
    language = {"activations": activations, "kv": kv, "context": context}
    loaded: LanguageModel | None = None
    if is_language_model(model):
        loaded = open_language_model(
            model, target=here, activations=activations, kv=kv, context=context, **options
        )
        program = loaded.program
    else:
        given = next((name for name, value in language.items() if value is not None), None)
        if given is not None:
            raise click.UsageError(f"--{given} is for language models, which {model} is not")
        program = open_model(model, target=here, **options)
    with progress(f"writing {output}"):
        if as_text:
            write_text(lir_for(program, other) if other else program.lir, output)
        elif loaded is not None:
            save_language_model(loaded, output, (other, *also) if other else also, own=not other)
        elif other:
            save(program, output, (other, *also), own=False)
        else:
            program.save(output, also)
    seconds, size = time.perf_counter() - start, Path(output).stat().st_size
    stats = program.stats
    if as_json:
        facts = {"file": output, "bytes": size, "seconds": seconds, "stats": stats, "notes": program.notes}
        print_json(facts)
        return
    targets = ", ".join(dict.fromkeys((other or program.lir.target, *also)))
    kernels = f"{counted(stats['kernels'], 'kernel')} ({stats['distinct_kernels']} distinct)"
    thunks = counted(len(stats["host_thunks"]), "host thunk")
    print_line(
        f"{output}: {human_bytes(size)}, {kernels} and {thunks}, "
        f"{'a plan' if as_text else 'code'} for {targets}, in {human_time(seconds)}"
    )
