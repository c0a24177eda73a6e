"""Options of a compilation, each declared once.

`rlx.compile`, `rlx.load`, `rlx.Session`, `rlx.jit`, the command line and the keys of stored programs take
their options from `Options`. A new field is an option of all of them, and its role decides whether it is
part of keys.
"""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from rlx import config
from rlx.errors import ConfigError
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.cost.gate import IoFusionGate
    from rlx.dist.transport import SymmetricTransport
    from rlx.driver.buffer import BufferHandle
    from rlx.ir.mesh import Mesh, Placements

PathLike = str | os.PathLike[str]
Function = TypeVar("Function", bound=Callable[..., object])


class Role(enum.Enum):
    """What an option decides about."""

    PLAN = "the plan: stored programs are known by it"
    RUN = "how a program runs: it is chosen each time that one is opened"
    LOCAL = "what only this process has: with it, a model is compiled each time"


def _option(default: Any, role: Role, flag: str = "", **about: Any) -> Any:
    """A field. One with the text of a `flag` is an option of the command line, too; one with a `kept` type
    is written in plans, and read from files as that type only."""
    return field(default=default, metadata={"role": role, "flag": flag, **about})


@dataclass(frozen=True)
class Options:
    """How a graph is compiled and run.

    `assume` gives sizes to optimise for. `budget` is the most memory for activations, like "64MiB": the
    program is changed to fit it, or refused with the live values and the least budget that works; with
    symbolic sizes, the budget is checked once sizes are known. With `background`, the default of `rlx.load`
    for models that it compiles, first runs may use code that is not optimised and has the same bits, while a
    thread makes the best code: a start is faster, then runs are slower for a second or two (`stats["code"]`
    says which code runs, `wait_for_code` waits for the best). `debug` is "nan" (name the first kernel that
    gives one) or "poison" (overwrite freed memory and stop kernels that touch it). `gate` decides about
    fusion: a gate, or "calibrated" for constants measured on this machine. `pins` says of pairs of nodes (by
    their ids in `decisions`) whether they shall be one kernel; without `winograd` convolutions never use
    Winograd's algorithm. `checks` verifies the graph after each stage;
    `dump` is a folder that gets the text of each, and LLVM IR and assembly of every CPU kernel (`kernel-4.ll`
    and `kernel-4.s` for kernel %4 of `explain`); `override` maps a stage to a file whose graph replaces the
    result of the stage.

    With a `weight_budget`, like "200MiB", weights that exceed it stay in a file and are prefetched before the
    kernels that need them: in `weight_file`, which `rlx.load` can open later, or in a file of the cache. With
    a `mesh` the program is one rank's part of the graph: `shardings` says how inputs, params, states and
    outputs are cut over it, `transport` who the other ranks are (by default the job that `rlx launch`
    started). `states` binds states to handles, so that they survive runs; without it every run begins with
    their initial values.

    >>> Options(threads=2).changed()
    {'threads': 2}
    """

    device: str = _option("cpu", Role.PLAN, "Device to run on, cpu or opencl [cpu]; see rlx devices.")
    target: str = _option("host", Role.PLAN, "CPU target to compile for [this machine]; see rlx devices.")
    threads: int | None = _option(None, Role.RUN, "Number of threads [all cores].", short="-t")
    precision: str = _option(
        "f32", Role.PLAN, "Precision of matmuls [f32].", choices=("f32", "bf16", "f16"), kept=str
    )
    budget: int | str | None = _option(
        None, Role.PLAN, "Memory limit for activations, like 64MiB [none].", metavar="BYTES", kept=int
    )
    assume: Mapping[str, int] | None = _option(
        None, Role.PLAN, "Size to optimise for.", metavar="NAME=SIZE", short="-a"
    )
    cache: bool = _option(True, Role.RUN, "Use code that earlier runs compiled [yes].")
    background: bool | None = _option(None, Role.RUN)
    debug: str | None = _option(None, Role.RUN)
    gate: IoFusionGate | str | None = _option(None, Role.LOCAL)
    pins: Mapping[tuple[int, int], bool] | None = _option(None, Role.LOCAL)
    checks: bool = _option(False, Role.LOCAL)
    dump: PathLike | None = _option(None, Role.LOCAL)
    override: Mapping[str, PathLike] | None = _option(None, Role.LOCAL)
    weight_budget: int | str | None = _option(
        None, Role.PLAN, "Memory limit for weights, like 200MiB [none].", metavar="BYTES", kept=int
    )
    weight_file: PathLike | None = _option(None, Role.LOCAL)
    winograd: bool | None = _option(None, Role.PLAN, kept=bool)
    mesh: Mesh | None = _option(None, Role.LOCAL)
    shardings: Mapping[str, Placements] | None = _option(None, Role.LOCAL)
    transport: SymmetricTransport | None = _option(None, Role.LOCAL)
    states: Mapping[str, BufferHandle] | None = _option(None, Role.LOCAL)

    @classmethod
    def of(
        cls,
        options: Options | None,
        given: Mapping[str, Any],
        caller: str = "rlx.compile",
        more: Sequence[str] = (),
    ) -> Options:
        """The options of a call: those of an `Options` object, with the given ones in their place. `more` are
        the caller's own, which a mistake may have meant.

        >>> Options.of(Options(threads=2), {"precision": "bf16"}).changed()
        {'threads': 2, 'precision': 'bf16'}
        """
        if options is not None and not isinstance(options, Options):
            raise ConfigError(
                f"{caller} takes options by name, or an rlx.Options; got {options!r} of type "
                f"{type(options).__name__}"
            )
        for name in given:
            if name not in FIELDS:
                import difflib  # for mistakes only

                near = difflib.get_close_matches(name, [*more, *FIELDS], 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join([*more, *FIELDS])}"
                raise ConfigError(f"{caller}: unknown option {name!r}; {hint}")
        return replace(options or DEFAULTS, **given) if given else options or DEFAULTS

    def changed(self) -> dict[str, object]:
        """The options that are not at their defaults."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not FIELDS[name].default}

    def settled(self) -> Settled:
        """The same with what the environment decides filled in, and byte counts as numbers.

        >>> Options(budget="1KiB", threads=1).settled().budget
        1024
        """
        decided: dict[str, object] = {
            "target": self._target_name(),
            "threads": config.thread_count(self.threads),
            "debug": self.debug or config.DEBUG.get(),
            "background": bool(self.background),
            "winograd": config.WINOGRAD.get() if self.winograd is None else bool(self.winograd),
        }
        for name in ("budget", "weight_budget"):
            given = getattr(self, name)
            decided[name] = None if given is None else config.parse_bytes(given, name)
        return Settled(**{name: getattr(self, name) for name in FIELDS} | decided)

    def _target_name(self) -> str:
        """The named target of the CPU; what a device is, it knows itself."""
        if self.device != "cpu":
            return self.target
        from rlx.target.cpu import resolve  # start time of `import rlx`

        return resolve(config.TARGET.get() if self.target == "host" else self.target).name

    def key(self) -> dict[str, object]:
        """The key of a stored program, besides its model: every option that decides about the plan, and
        the machine that RLX sees."""
        from rlx.target.cpu import host  # start time of `import rlx`

        settled = self.settled()
        deciding = {name: getattr(settled, name) for name in FIELDS if role(name) is Role.PLAN}
        return {**deciding, "host": host().name}

    def is_storable(self) -> bool:
        """Whether a program that is compiled with these options can be stored for later processes."""
        return not any(getattr(self, name) for name in FIELDS if role(name) is Role.LOCAL)


@dataclass(frozen=True)
class Settled(Options):
    """Options that leave nothing to the environment."""

    threads: int = 1
    budget: int | None = None
    weight_budget: int | None = None
    winograd: bool = True


FIELDS: Mapping[str, Field[Any]] = Options.__record_fields__  # type: ignore[attr-defined]
DEFAULTS = Options()
KEPT = {name: known.metadata["kept"] for name, known in FIELDS.items() if "kept" in known.metadata}
"""Options that a plan states, with their types."""


def role(name: str) -> Role:
    """The role of an option.

    >>> role("precision").name
    'PLAN'
    """
    found: Role = FIELDS[name].metadata["role"]
    return found


class LoadOptions(TypedDict, total=False):
    """The options of `rlx.load` for type checkers: those of `Options`, as a test compares."""

    device: str
    target: str
    threads: int | None
    precision: str
    budget: int | str | None
    assume: Mapping[str, int] | None
    cache: bool
    background: bool | None
    debug: str | None
    gate: IoFusionGate | str | None
    pins: Mapping[tuple[int, int], bool] | None
    checks: bool
    dump: PathLike | None
    override: Mapping[str, PathLike] | None
    weight_budget: int | str | None
    weight_file: PathLike | None
    winograd: bool | None
    mesh: Mesh | None
    shardings: Mapping[str, Placements] | None
    transport: SymmetricTransport | None


class CompileOptions(LoadOptions, total=False):
    """The options of `rlx.compile` for type checkers. The `states` of `rlx.load` are other ones."""

    states: Mapping[str, BufferHandle] | None


def shows_options(function: Function) -> Function:
    """Decorator: `help` and editors see the options by name instead of `**given`."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in kept}
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=known.default)
        for name, known in FIELDS.items()
        if name not in taken
    ]
    function.__signature__ = signature.replace(parameters=[*kept, *named])  # type: ignore[attr-defined]
    return function
