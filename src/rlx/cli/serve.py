"""rlx serve: a language model behind HTTP."""

from __future__ import annotations

import logging
from typing import cast

import click

from rlx.cli.chat import activations_option, context_option, kv_option, sampling_options
from rlx.cli.output import json_option, print_json, print_line, print_note, progress
from rlx.llm.batching.program import SLOTS
from rlx.llm.engine import Engine
from rlx.llm.sample import Sampling, SamplingOptions
from rlx.progress import NAME
from rlx.serve.keys import Keys, read_keys
from rlx.serve.server import Server


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one."
)
@click.option(
    "--api-key-file", metavar="FILE", default=None, help="File with the API keys, one on each line [none]."
)
@click.option("--draft", default=None, help="Small model that proposes tokens, or lookup [none].")
@click.option("--model-name", default=None, help="What clients call the model [its file's name].")
@click.option(
    "--slots", type=click.IntRange(min=1), default=SLOTS, show_default=True, help="Answers generated at once."
)
@click.option(
    "--queue", type=click.IntRange(min=0), default=64, show_default=True, help="Requests that may wait."
)
@click.option(
    "--kv-memory", metavar="BYTES", default="1GiB", show_default=True, help="Memory for keys and values."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Longest answer [the context].")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a request may take.",
)
@sampling_options
@activations_option
@kv_option
@context_option
@click.option("--threads", "-t", type=click.IntRange(min=1), default=None, help="Number of threads [all].")
@click.option("--quiet", "-q", is_flag=True, help="Log no requests.")
@json_option
def serve(
    model: str,
    host: str,
    port: int,
    api_key_file: str | None,
    draft: str | None,
    model_name: str | None,
    slots: int,
    queue: int,
    kv_memory: str,
    max_tokens: int | None,
    timeout: float,
    activations: str | None,
    kv: str | None,
    context: int | None,
    threads: int | None,
    quiet: bool,
    as_json: bool,
    **sampling: float | None,
) -> None:
    """Serve the language MODEL as OpenAI's clients expect it.

    It is a GGUF file, a folder with config.json, zoo:ID, or what rlx compile made of one of these.

    Stdout gets the address; requests are logged on stderr. SIGTERM and Ctrl-C finish the requests that are
    here; a second signal stops at once. The address itself shows a page to chat with. The options for
    choosing tokens hold where a request has none of its own.
    """
    chosen = cast("SamplingOptions", {name: value for name, value in sampling.items() if value is not None})
    defaults = Sampling(**chosen)
    keys = Keys([]) if api_key_file is None else read_keys(api_key_file)
    with progress(f"loading {model}") as say:
        engine = Engine(
            model,
            draft=draft,
            slots=slots,
            queue=queue,
            kv_memory=kv_memory,
            activations=activations,
            kv=kv,
            context=context,
            notify=say,
            threads=threads,
        )
    with engine:
        server = Server(
            engine,
            host=host,
            port=port,
            name=model_name or (model.removeprefix("zoo:") if model.startswith("zoo:") else None),
            keys=keys,
            sampling=defaults,
            max_tokens=max_tokens,
            timeout=timeout,
        )
        if not quiet:
            _log_to_stderr()
        if as_json:
            print_json(
                {
                    "url": server.url,
                    "model": server.name,
                    "keys": bool(keys),
                    "slots": slots,
                    "context": engine.longest,
                }
            )
        else:
            print_line(server.url)
            print_note(f"{engine!r} as {server.name!r}; Ctrl-C stops")
        server.run()


class _Notes(logging.Handler):
    """Messages of the log as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print_note(self.format(record))


def _log_to_stderr() -> None:
    notes, logger = _Notes(), logging.getLogger(NAME)
    notes.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
