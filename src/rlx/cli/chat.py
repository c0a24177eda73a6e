"""rlx chat: ask a language model, or talk to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import click

from rlx.cli.output import print_line, print_note, print_piece, progress
from rlx.errors import RlxError
from rlx.llm.config import ACTIVATIONS
from rlx.llm.hf import read_json
from rlx.llm.model import AnswerOptions, LanguageModel, load
from rlx.llm.sample import Sampling, SamplingOptions

_USUAL = " [f32, or what a file was prepared with]."

Command = TypeVar("Command", bound=Callable[..., object])

_HELP = """/help          this list
/reset         forget the conversation
/system TEXT   start anew with a system prompt
/quit          leave (so does the end of the input)
Anything else is said to the model. Ctrl-C stops an answer."""

_SAMPLING = (
    ("--temperature", float, "How freely tokens are chosen; 0 takes the likeliest [0]."),
    ("--top-k", int, "Choose among this many tokens; 0 for all [0]."),
    ("--top-p", float, "Choose among the likeliest tokens with this sum of probabilities [1]."),
    ("--min-p", float, "Choose among tokens at least this much as likely as the best [0]."),
    ("--repetition-penalty", float, "Make tokens that were there before less likely; 1 is off [1]."),
    ("--seed", int, "Same seed, same answer [0]."),
)


def sampling_options(command: Command) -> Command:
    """The fields of `rlx.llm.Sampling` as options."""
    for flag, kind, text in reversed(_SAMPLING):
        command = click.option(flag, type=kind, default=None, help=text)(command)
    return command


def activations_option(command: Command) -> Command:
    """What matmuls with weights of 4 to 8 bits multiply."""
    text = "Multiply weights of 4 to 8 bits by f32, or by activations rounded to 8 bits, which is faster"
    return click.option("--activations", type=click.Choice(ACTIVATIONS), default=None, help=text + _USUAL)(
        command
    )


def kv_option(command: Command) -> Command:
    """What keys and values are."""
    text = "Keep keys and values in f32, or rounded to 8 bits, in a quarter of the memory"
    return click.option("--kv", type=click.Choice(ACTIVATIONS), default=None, help=text + _USUAL)(command)


def context_option(command: Command) -> Command:
    """How long a conversation may be."""
    text = "Tokens of a conversation [4096]."
    return click.option("--context", type=click.IntRange(min=1), default=None, help=text)(command)


@click.command()
@click.argument("prompt", nargs=-1)
@click.option(
    "--model",
    "-m",
    default="zoo:smollm2",
    show_default=True,
    help="GGUF or prepared file, folder, or zoo:ID.",
)
@click.option("--draft", default=None, help="Small model that proposes tokens, or lookup [none].")
@click.option("--system", "-s", default=None, help="What the model is to be, as a system prompt.")
@sampling_options
@click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated.")
@click.option("--json-schema", metavar="FILE", default=None, help="Answer with JSON of the schema in a file.")
@activations_option
@kv_option
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Longest answer [the context].")
@context_option
@click.option("--memory-limit", metavar="BYTES", default=None, help="Most memory, like 500MiB [none].")
@click.option("--threads", "-t", type=click.IntRange(min=1), default=None, help="Number of threads [all].")
def chat(
    prompt: tuple[str, ...],
    model: str,
    draft: str | None,
    system: str | None,
    stop: tuple[str, ...],
    json_schema: str | None,
    activations: str | None,
    kv: str | None,
    max_tokens: int | None,
    context: int | None,
    memory_limit: str | None,
    threads: int | None,
    **sampling: float | None,
) -> None:
    """Ask a language model the PROMPT, or the text on stdin; stdout gets the answer and nothing else.

    Without a prompt, on a terminal, it starts a conversation.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    chosen = cast("SamplingOptions", given)
    Sampling(**chosen)  # a wrong value is refused before the model is loaded
    schema = None if json_schema is None else read_json(Path(json_schema))
    asked = " ".join(prompt)
    talks = not prompt and sys.stdin.isatty()
    if not prompt and not talks:
        asked = sys.stdin.read().rstrip("\r\n")  # the end of its last line is not part of a question
    if not talks and not asked.strip():
        raise click.UsageError("the prompt is empty; give a text")
    with progress(f"loading {model}") as say:
        loaded = load(
            model,
            draft=draft,
            activations=activations,
            kv=kv,
            context=context,
            memory_limit=memory_limit,
            notify=say,
            threads=threads,
        )
    talk = Talk(loaded, system, {"stop": stop, "max_tokens": max_tokens, "schema": schema, **chosen})
    if talks:
        converse(talk)
        return
    talk.answer(asked)
    if sys.stderr.isatty():
        print_note(talk.speed)


class Talk:
    """A conversation and how it is answered."""

    def __init__(self, model: LanguageModel, system: str | None, options: AnswerOptions) -> None:
        self.model, self.options, self.speed = model, options, ""
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def answer(self, text: str) -> None:
        """Say something, and print the answer as it comes. Text that the model refuses is not kept."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            tokens = self.model.prompt(self.messages)
            before = self.model.drafted
            start = time.perf_counter()
            first = start
            for piece in self.model.stream(tokens, **self.options):
                if not pieces:
                    first = time.perf_counter()
                pieces.append(piece)
                print_piece(piece)
        except RlxError:
            self.messages.pop()
            raise
        except KeyboardInterrupt:  # the part of the answer so far is kept
            print_line()
            print_note("stopped")
        end = time.perf_counter()
        said = "".join(pieces)
        print_line()
        self.messages.append({"role": "assistant", "content": said})
        made = self.model.generated
        rate = (made - 1) / (end - first) if made > 1 and end > first else 0.0
        self.speed = f"{made} tokens, {rate:.1f} tokens/s, the first after {first - start:.2f} s"
        proposed, accepted = (now - then for now, then in zip(self.model.drafted, before, strict=True))
        if proposed:
            self.speed += f", {accepted} of {proposed} drafted tokens accepted"


def converse(talk: Talk) -> None:
    """Read lines and answer them, until the input ends."""
    print_note(f"{talk.model!r}; /help lists the commands")
    while True:
        try:
            line = click.prompt("", prompt_suffix="> ", err=True, default="", show_default=False).strip()
        except click.Abort:
            print_note("")
            return
        if line == "/quit":
            return
        if line == "/help":
            print_note(_HELP)
        elif line == "/reset":
            talk.reset(talk.system)
        elif line.startswith("/system"):
            talk.reset(line.removeprefix("/system").strip() or None)
        elif line.startswith("/"):
            print_note(f"unknown command {line.split()[0]}; /help lists them")
        elif line:
            try:
                talk.answer(line)
                print_note(talk.speed)
            except RlxError as error:
                print_note(f"rlx: {error}")
