"""Models from files: `load`, and `Session`, which keeps options for several programs."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Unpack

import numpy as np

from rlx import config, progress
from rlx.api.options import FIELDS, KEPT, CompileOptions, LoadOptions, Options, Role, role, shows_options
from rlx.collector import collector_paused
from rlx.crash_report import reports_crashes
from rlx.errors import ConfigError, FormatError, ModelImportError, UnsupportedError, warn
from rlx.files import file_boundary, identity, open_plain, read_plain
from rlx.ir.text.container import GRAPH, PLAN, PROGRAM
from rlx.model_kinds import ONNX_BYTES, START, about_folder, instead_of, is_onnx_object, what_else
from rlx.runtime.store.artifact import Artifact, ArtifactWarning, Origin
from rlx.runtime.store.programs import ProgramStore
from rlx.target.cpu import resolve, runs_here, targets

if TYPE_CHECKING:
    from rlx.ir.attr import AttrValue
    from rlx.ir.graph import Graph
    from rlx.ir.operand import DimLike
    from rlx.plan.lir import LirModule
    from rlx.runtime.program import CompiledProgram
    from rlx.runtime.store.programs import Known

    Imported = tuple[Graph, Sequence[Known]]
    """A graph, and the other files that it was read from as they were before."""

ZOO_PREFIX = "zoo:"


@shows_options
@reports_crashes
@collector_paused()
def load(
    model: object,
    *,
    shapes: Mapping[str, Sequence[DimLike]] | None = None,
    states: Mapping[str, str] | None = None,
    trust_native: bool = False,
    custom: Collection[str] = (),
    strict: bool = False,
    **given: Unpack[LoadOptions],
) -> CompiledProgram:
    """A program from a model file: import and compile, or, for a `.rlx` file, map it and go.

    `model` is the path of an ONNX file, a `.rlx` file, a graph as text or as `rlx.ir.text.files` wrote it, or
    `zoo:ID`; or an ONNX model in memory: a ModelProto, its bytes, or the ONNXProgram of `torch.onnx.export`.
    `shapes` replaces declared shapes of an ONNX model. `states` names inputs that take an output of the run
    before, as in {"state": "stateN"}: they become states. The other options are the fields of `rlx.Options`.
    A compiled model is kept in the cache, and loaded from there while the file does not change
    (`cache=False`: neither). What `save` of a sharded program wrote is loaded on as many ranks.
    `trust_native` runs the code of a `.rlx` file, signed or not; a file that this user did not sign is
    else compiled again from the graph in it. `custom` names the ops of `rlx.register_op` that a file may
    call; without, it calls none. How much of the program is native is logged in one line (logger "rlx"); with
    `strict`, a program of which the host computes a part is refused.

    >>> import tempfile, numpy as np, rlx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "double.txt")
    ...     _ = file.write_text('''graph "double" {
    ...         %0 = input() {name="x", type=f32[n]}
    ...         %1 = add(%0, %0)
    ...         output "y" = %1
    ...     }''')
    ...     rlx.load(file)(np.ones(2, np.float32))
    array([2., 2.], dtype=float32)
    """
    chosen = Options.of(None, given, "rlx.load")
    if isinstance(model, ONNX_BYTES) or is_onnx_object(model):
        program = _compile(_onnx_graph(model, shapes, states), chosen)
        return _judged(program, "the model", strict)
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        got = repr(model) if isinstance(model, str) else f"a value of type {type(model).__name__}"
        raise ConfigError(
            f"rlx.load takes the path of a model, zoo:ID or an ONNX model, not {got}{instead_of(model)}"
        )
    program = _loaded(os.fspath(model), shapes, states, trust_native, custom, {**given})
    return _judged(program, os.fspath(model), strict)


def _judged(program: CompiledProgram, name: str, strict: bool) -> CompiledProgram:
    """Say how much of a program is native; with `strict`, refuse what is not all native."""
    told = f"{name}: {program.native_share}"
    if strict and program.stats["host_thunks"]:
        why = program.stats["host_thunks"][0]["why"]
        raise UnsupportedError(f"{told} ({why}); load it without strict=True to run it all the same")
    progress.info("%s", told)
    return program


def _loaded(
    name: str,
    shapes: Mapping[str, Sequence[DimLike]] | None,
    states: Mapping[str, str] | None,
    trust_native: bool,
    custom: Collection[str],
    options: dict[str, AttrValue],
) -> CompiledProgram:
    if name.startswith(ZOO_PREFIX):
        return _from_zoo(name.removeprefix(ZOO_PREFIX), shapes, states, options)
    path = Path(name)
    if path.suffix == ".rlx" and not path.exists():
        from rlx.dist.stored import own_file  # start time: few programs are sharded

        path = own_file(path, options.get("transport"))
    kind = _kind(path)
    if kind == "program":
        if shapes is not None:
            raise ConfigError(f"{name} is compiled already; shapes are for ONNX models")
        if states is not None:
            raise ConfigError(f"{name} is compiled already; its states are those that it was compiled with")
        return _from_artifact(path, trust_native, custom, options)
    if kind == "onnx":
        return _from_onnx(path, shapes, states, options)
    if shapes is not None:
        raise ConfigError(f"{name} is a graph, whose shapes are written in it; shapes are for ONNX models")
    return _stored(known(path), None, states, options, lambda: (read_graph(path, custom=custom), ()), custom)


class Session:
    """A device and options that several programs share.

    >>> import numpy as np, rlx
    >>> g = rlx.Graph("double")
    >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
    >>> session = rlx.Session(device="cpu", threads=1)
    >>> session.compile(g)(np.ones(2, np.float32))
    array([2., 2.], dtype=float32)
    """

    @shows_options
    def __init__(self, options: Options | None = None, **given: Unpack[CompileOptions]) -> None:
        self.options = Options.of(options, given, "rlx.Session")

    def __repr__(self) -> str:
        shown = {"device": self.options.device, **self.options.changed()}
        return f"<session {', '.join(f'{name}={value!r}' for name, value in shown.items())}>"

    def compile(self, graph: Graph, **given: Unpack[CompileOptions]) -> CompiledProgram:
        """`rlx.compile` with the options of the session; those given here win."""
        return _compile(graph, Options.of(self.options, given))

    def load(self, model: object, **given: AttrValue) -> CompiledProgram:
        """`rlx.load` with the options of the session; those given here win."""
        return load(model, **{**self.options.changed(), **given})


def restore(data: bytes, target: str, threads: int, debug: str | None) -> CompiledProgram:
    """The program in the bytes of a `.rlx` file: what unpickling calls.

    The file's own rules hold. Code that this user signed is run as it is; anywhere else, or with another
    version of RLX, the program is compiled again.
    """
    machine = resolve(target if runs_here(resolve(target)) else config.TARGET.get())
    handle, name = tempfile.mkstemp(prefix="rlx-pickle-", suffix=".rlx")
    remove = functools.partial(Path(name).unlink, missing_ok=True)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        file = Artifact(name)
        options = {"threads": threads, "debug": debug, "target": machine.name}
        number = file.find(machine)
        if number is not None and file.is_trusted(number):
            program = _open(file, number, options)
        else:
            program = _compile(file.source(None), Options.of(None, {**file.planned_with(0, KEPT), **options}))
            _note_that_it_was_compiled(program, file, number, f"the pickled program {file.name!r}")
    except BaseException:
        remove()
        raise
    if "weight_budget" in program.lir.options:  # its weights are read from the file during runs
        weakref.finalize(program, remove)
    else:
        remove()
    return program


def read_graph(
    model: str | os.PathLike[str],
    shapes: Mapping[str, Sequence[DimLike]] | None = None,
    custom: Collection[str] = (),
) -> Graph:
    """The graph of a model: `zoo:ID`, or a file of any kind that `load` takes."""
    name = os.fspath(model)
    if name.startswith(ZOO_PREFIX):
        path = _zoo().fetch(name.removeprefix(ZOO_PREFIX))
        return _encoder_graph(path) if path.suffix == ".safetensors" else read_graph(path, shapes)
    path = Path(name)
    kind = _kind(path)
    if kind == "program":
        graph = Artifact(path).source(custom)
        graph.param_values = {name: np.asarray(value) for name, value in graph.param_values.items()}
        return graph
    if kind == "onnx":
        return _onnx_graph(path, shapes)
    from rlx.ir.text import files  # start time: a program from a file needs no graph

    if kind == "graph":
        return files.load(path, custom)
    with file_boundary(path, "graph"):
        try:
            return files.read_foreign(read_plain(path).decode(), custom=custom)
        except UnicodeDecodeError:
            raise FormatError(f"{path} is neither a model nor text in UTF-8") from None


def _onnx_graph(
    model: object,
    shapes: Mapping[str, Sequence[DimLike]] | None,
    states: Mapping[str, str] | None = None,
) -> Graph:
    from rlx.frontend.onnx import from_onnx  # start time: a program that was stored needs no frontend

    return from_onnx(model, shapes=shapes, states=states)


def _zoo() -> ModuleType:
    from rlx import zoo  # start time: few models come from there

    return zoo


def _encoder_graph(path: Path, lazy: bool = False) -> Graph:
    from rlx.zoo.minilm import load_graph  # start time: it has all ops

    return load_graph(path.parent, lazy)


def _kind(path: Path) -> str:
    """What a file holds, by its first bytes; ONNX has no mark of its own and is what remains."""
    try:
        with open_plain(path) as file:
            start = file.read(START)
    except OSError as e:
        raise _unreadable(path, e) from None
    if start.startswith(PROGRAM.mark):
        return "program"
    if start.startswith(GRAPH.mark):
        return "graph"
    if start.startswith((PLAN.mark, b"rlx plan ")):
        raise FormatError(f"{path} is a plan, which has no model to run; compare it with rlx diff")
    is_text = start.lstrip()[:1] in (b"g", b"#") and not re.match(rb"\s*graph\s*\{", start)  # ONNX as text
    if path.suffix != ".onnx" and is_text:
        return "text"
    other = what_else(start, str(path))
    if path.suffix == ".rlx":
        told = f"it is {other}" if other else f"rlx files begin with the bytes {PROGRAM.begins}"
        raise FormatError(f"{path}: not a compiled program; {told}")
    if other is not None:
        raise ModelImportError(f"{path} is {other}")
    return "onnx"


def _unreadable(path: Path, error: OSError) -> ModelImportError:
    """A file that is not there or cannot be opened, with what the user may have meant."""
    if path.is_dir():
        return ModelImportError(f"{path} {about_folder(path)}")
    told = f"cannot read the model {str(path)!r}: {error.strerror or error}"
    near = get_close_matches(path.name, _names_in(path.parent), n=1, cutoff=0.8)
    if str(path) in (model.id for model in _zoo().models()):
        told += f"; for the model of the zoo give {ZOO_PREFIX}{path}"
    elif near and not path.exists():
        told += f"; did you mean {path.with_name(near[0])}?"
    return ModelImportError(told)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _compiler() -> ModuleType:
    import rlx.api.compile as compiler  # start time: a program from a file needs no compiler

    return compiler


def _compile(graph: Graph, options: Options) -> CompiledProgram:
    program: CompiledProgram = _compiler().compile(graph, options)
    return program


def _from_zoo(
    id: str,
    shapes: Mapping[str, Sequence[DimLike]] | None,
    states: Mapping[str, str] | None,
    options: dict[str, AttrValue],
) -> CompiledProgram:
    path: Path = _zoo().fetch(id)
    if path.suffix != ".safetensors":
        return _loaded(str(path), shapes, states, False, (), options)

    return _stored(known(path), shapes, states, options, lambda: (_encoder_graph(path, lazy=True), ()))


def _from_onnx(
    path: Path,
    shapes: Mapping[str, Sequence[DimLike]] | None,
    states: Mapping[str, str] | None,
    options: dict[str, AttrValue],
) -> CompiledProgram:
    def import_() -> Imported:
        from rlx.frontend.onnx import from_file, open_file  # start time

        model, files = open_file(path)  # once: it may be large
        others = [known(file) for file in files]  # before they are read
        return from_file(model, shapes), others

    return _stored(known(path), shapes, states, options, import_)


def known(path: Path) -> Known:
    """What a file is now, before it is read."""
    return str(path), identity(path)


def _stored(
    model: Known,
    shapes: Mapping[str, Sequence[DimLike]] | None,
    states: Mapping[str, str] | None,
    options: dict[str, AttrValue],
    import_: Callable[[], Imported],
    custom: Collection[str] = (),
) -> CompiledProgram:
    """The program of a model file. Its key is everything that its graph depends on."""
    more: dict[str, object] = {"shapes": None if shapes is None else repr(sorted(shapes.items()))}
    if states:
        more["states"] = dict(states)
    if custom:
        more["custom"] = sorted(custom)
    chosen: dict[str, AttrValue] = {"background": True, **options}  # somebody waits for a first result
    return stored_program(model, chosen, more, lambda: _imported(import_, states))


def stored_program(
    model: Known, options: dict[str, AttrValue], more: Mapping[str, object], import_: Callable[[], Imported]
) -> CompiledProgram:
    """The program of a model file: from the store, or imported, compiled and stored.

    Its key is the file, the options, and `more`: whatever else its graph depends on.
    """
    chosen = Options.of(None, options)
    on_host = chosen.device == "cpu"  # files hold host programs
    if not chosen.is_storable() or not on_host or not chosen.cache:
        return _compile(import_()[0], chosen)
    key = {**chosen.key(), **more}
    target = resolve(chosen.settled().target)
    store = ProgramStore()
    found = store.find(model, key)
    number = None if found is None else found.find(target)
    if found is not None and number is not None:
        progress.info("program of %s: from the cache", model[0])
        return _open(found, number, options)
    progress.info("importing %s", model[0])
    graph, others = import_()
    program = _compile(graph, chosen)
    store.put(program, model, key, others)
    return program


def _imported(import_: Callable[[], Imported], states: Mapping[str, str] | None) -> Imported:
    graph, others = import_()
    return (graph.with_states(states) if states else graph), others


def _from_artifact(
    path: Path, trust_native: bool, custom: Collection[str], options: dict[str, AttrValue]
) -> CompiledProgram:
    file = Artifact(path)
    progress.info("opening %s", path)
    if "ranks" in file.facts:
        _check_unchanged_options(path, options, {"transport"})
        return _of_one_rank(file, trust_native, custom, options)
    _check_unchanged_options(path, options, {"device", "weight_budget"})
    if options.get("device", "cpu") != "cpu":
        return _compile(file.source(custom), Options.of(None, options))

    def compiled(model: Known, given: dict[str, AttrValue]) -> CompiledProgram:
        return _stored(model, None, None, given, lambda: (file.source(custom), ()), custom)

    return opened_program(file, trust_native, options, compiled)


def _check_unchanged_options(path: Path, options: Collection[str], more: Collection[str]) -> None:
    """Refuse options that decide about the plan of a program that is compiled already."""
    known = {name for name in FIELDS if role(name) is Role.RUN} | {"target", *more}
    fixed = sorted(set(options) - known)
    if fixed:
        raise ConfigError(f"{path} is compiled already; {fixed[0]} cannot be changed, compile it again")


def opened_program(
    file: Artifact,
    trust_native: bool,
    options: dict[str, AttrValue],
    compiled: Callable[[Known, dict[str, AttrValue]], CompiledProgram],
) -> CompiledProgram:
    """A program of an open file: as it is there, if this user trusts its code and it is for this machine; or
    `compiled` with the options that it was planned with, for the file as it is now.
    """
    path = Path(file.container.path)
    _check_unchanged_options(path, options, {"device", "weight_budget"})
    number = file.find(resolve(Options.of(None, options).settled().target))
    if number is None and "target" not in options and importlib.util.find_spec("llvmlite") is None:
        number = _for_lesser_machine(file)
    if number is not None and (trust_native or file.is_trusted(number)):
        return _open(file, number, options)
    planned = {} if number is None else file.planned_with(number, KEPT)
    model = str(path), file.container.status  # of the file that was opened, even if another has its name now
    program = compiled(model, planned | options)
    _note_that_it_was_compiled(program, file, number)
    return program


def compiled_elsewhere(
    file: Artifact,
    options: dict[str, AttrValue],
    compiled: Callable[[Known, dict[str, AttrValue]], CompiledProgram],
) -> CompiledProgram:
    """Another program of what an open file holds: `compiled` with the options that it was planned with."""
    path = file.container.path
    _check_unchanged_options(Path(path), options, {"device", "weight_budget"})
    planned = file.planned_with(0, KEPT) if file.targets else {}
    planned.pop("assume", None)  # sizes of another graph
    return compiled((path, file.container.status), planned | options)


def _for_lesser_machine(file: Artifact) -> int | None:
    """The best code of a file that this machine runs, where nothing can be compiled for it."""
    there = (file.find(t) for t in targets() if t.name in file.targets and runs_here(t))
    return next((number for number in there if number is not None), None)


def _note_that_it_was_compiled(
    program: CompiledProgram, file: Artifact, number: int | None, pickled: str | None = None
) -> None:
    """Say why a compiled file was compiled again; of a file that somebody else signed, aloud."""
    name, there = pickled or file.container.path, ", ".join(file.targets) or "nothing"
    if number is None:
        told = f"{name} has code for {there}, not for this machine and version; it was compiled"
    else:
        told = f"{name} is not signed by this user: its code was not run, its graph was compiled again"
        if pickled is None:
            told += " (rlx trust FILE accepts it)"
        warn(told, ArtifactWarning)
    program.notes.append(told)


def _of_one_rank(
    file: Artifact, trust_native: bool, custom: Collection[str], options: dict[str, AttrValue]
) -> CompiledProgram:
    """The program of a rank; its graph has collectives, so it is compiled as it is written."""
    from rlx.dist.stored import StoredRank  # start time: few programs are sharded

    stored = StoredRank(file, options.pop("transport", None))
    number = file.find(resolve(Options.of(None, options).settled().target))
    if number is not None and (trust_native or file.is_trusted(number)):
        return _open(file, number, options, stored.make())
    source = file.source(custom)
    planned = {} if number is None else file.planned_with(number, KEPT)
    of_rank = {**planned, **options, "mesh": stored.mesh, "transport": stored.transport}
    program = _compile(source, Options.of(None, of_rank))
    program.sharded = stored.sharded(source)  # type: ignore[attr-defined]
    _note_that_it_was_compiled(program, file, number)
    return program


def _open(
    file: Artifact,
    number: int,
    options: Mapping[str, AttrValue],
    make: Callable[..., CompiledProgram] | None = None,
) -> CompiledProgram:
    chosen = Options.of(None, options).settled()
    program = file.program(number, chosen.threads, chosen.debug, chosen.weight_budget, make)
    lir = program.lir  # not the program: one that holds itself would keep its memory when it is dropped
    source = functools.partial(file.source, None)  # this user's own: it calls what it was saved with
    program.origin = Origin(source, lambda graph, target: _plan(graph, target, lir))
    return program


def _plan(graph: Graph, target: str, stored: LirModule) -> LirModule:
    """The graph of a stored program, planned for another target at the sizes that were assumed then."""
    with_sizes = {"target": target, "assume": stored.planner.binding}
    module: LirModule = _compiler().plan(graph, Options.of(None, {**stored.options, **with_sizes}))
    return module
