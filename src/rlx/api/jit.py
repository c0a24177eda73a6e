"""Functions that compile themselves: which program serves a call, and when a new one is compiled.

Calls with the same dtypes, ranks, static arguments and pytree have one signature. Its first call compiles for
its sizes. A size that differs from those seen before becomes a symbol of the next program, except 0 and 1.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import progress
from rlx.api.compile import compile
from rlx.api.options import Options
from rlx.errors import BudgetError, ConfigError, InputError, RlxError, TransformError, warn
from rlx.frontend.arguments import as_arrays, check_call, parameters_of, place_of
from rlx.frontend.trace import LEAST, Place, Trace, fits, sizes_of, trace_sizes
from rlx.ir.dim import Constraint, symbols
from rlx.ir.dims.choice import CHOICES, Choice, NumberNeeded, SizeChoices
from rlx.ir.dims.read import READER
from rlx.ir.dtype import DType, dtype
from rlx.ir.graph import Node
from rlx.ir.mesh import Shard
from rlx.ir.tree import Nest, Tree, flatten, leaf_paths, unflatten
from rlx.ir.types import TensorType
from rlx.ir.weak import NUMBERS, check_ranges, default
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram


MAX_PROGRAMS = 16
"""Programs that one signature keeps; the least recently used one is dropped."""

MAX_ASKED = 256
"""Sizes of which a program remembers whether it serves them."""

Dynamic = Mapping[int | str, Mapping[int, str]] | bool
Shapes = tuple[tuple[int, ...], ...]


class JitWarning(UserWarning):
    """A function compiles more programs than it can keep."""


@dataclass
class _Variant:
    """One program of a signature, with what must hold for a call that it serves."""

    trace: Trace
    program: CompiledProgram
    guards: Sequence[Constraint]
    shapes: Shapes | None  # of a program without symbols
    choices: Sequence[Choice] = ()
    used: int = 0
    asked: dict[Shapes, bool] = field(default_factory=dict)

    def serves(self, shapes: Shapes) -> bool:
        if self.shapes is not None:
            return self.shapes == shapes
        known = self.asked.get(shapes)
        if known is None:
            if len(self.asked) >= MAX_ASKED:
                self.asked.clear()
            known = self.asked[shapes] = self._fits(shapes)
        return known

    def _fits(self, shapes: Shapes) -> bool:
        if not fits(self.trace, self.guards, shapes):
            return False
        sizes = sizes_of(self.trace.graph, shapes)
        return sizes is not None and all(choice.holds(sizes) for choice in self.choices)


@dataclass
class _Signature:
    """What is known of calls with the same dtypes, ranks, static arguments and pytree."""

    paths: Sequence[str]  # how a user writes each array, such as params['w']
    variants: tuple[_Variant, ...] = ()  # newest first
    seen: dict[Place, set[int]] = field(default_factory=dict)
    refused: dict[frozenset[Place], str] = field(default_factory=dict)
    # a function may call itself on arrays while traced
    lock: AbstractContextManager[bool, None] = field(default_factory=threading.RLock)
    warned: bool = False

    def find(self, shapes: Shapes) -> _Variant | None:
        return next((v for v in self.variants if v.serves(shapes)), None)


@dataclass
class _Call:
    """One call: the types of its arrays, and the function without its static arguments."""

    function: Callable[..., Nest]
    types: Sequence[TensorType]
    tree: Tree
    shapes: Shapes
    numbers: Mapping[int, DType]  # arguments that are numbers, with their dtypes where no array decides


class Jit:
    """A function that is compiled on first use, and again for what its programs do not serve.

    `stats` has the number of `traces`, `why` each was compiled, the sizes that were `specialized` (with the
    line that read them), the `answers` to comparisons of sizes, and why symbols were `refused`.
    """

    def __init__(
        self,
        function: Callable[..., Nest],
        static: int | str | Sequence[int | str] = (),
        dynamic: Dynamic = False,
        **options: Nest,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, Options.of(None, options, "jit")
        self._static_places, self._static_names = _static_arguments(function, static)
        self._dynamic = _Symbols(function, dynamic)
        self._signatures: dict[object, _Signature] = {}
        self._clock = itertools.count(1)
        self.stats: dict[str, Any] = {
            "traces": 0,
            "why": [],
            "specialized": {},
            "answers": [],
            "refused": [],
        }

    def __repr__(self) -> str:
        kept = sum(len(s.variants) for s in self._signatures.values())
        names = ", ".join(p.name for p in parameters_of(self.function))
        return f"<jit of {place_of(self.function)}, arguments ({names}), {kept} program{'s' * (kept != 1)}>"

    def __call__(self, *args: Nest, **kwargs: Nest) -> Nest:
        leaves, _ = flatten((args, kwargs))
        if any(isinstance(leaf, Node) for leaf in leaves):
            return self.function(*args, **kwargs)  # inside another trace
        variant, arrays = self._variant(args, kwargs)
        out = variant.program.run({f"arg{i}": a for i, a in enumerate(arrays)})
        return unflatten(variant.trace.result, list(out.values()))

    def program(self, *args: Nest, **kwargs: Nest) -> CompiledProgram:
        """The compiled program that a call with these arguments runs; its inputs are arg0, arg1 ...

        >>> import numpy as np, rlx
        >>> double = rlx.jit(lambda x: x * 2.0)
        >>> double.program(np.ones(3, np.float32)).run({"arg0": np.ones(3, np.float32)})
        {'out0': array([2., 2., 2.], dtype=float32)}
        """
        return self._variant(args, kwargs)[0].program

    def _variant(
        self, args: tuple[Nest, ...], kwargs: dict[str, Nest]
    ) -> tuple[_Variant, Sequence[np.ndarray]]:
        fixed_args = {i: args[i] for i in self._static_places if i < len(args)}
        fixed_kwargs = {k: kwargs[k] for k in self._static_names if k in kwargs}
        moving = tuple(None if i in fixed_args else a for i, a in enumerate(args))
        moving_kwargs = {k: v for k, v in kwargs.items() if k not in fixed_kwargs}
        leaves, tree = flatten((moving, moving_kwargs))
        numbers = {i: default(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, NUMBERS)}
        arrays = as_arrays(leaves, lambda: leaf_paths(tree, _argument_names(self.function)))
        key = (
            tree,
            tuple(numbers),
            tuple([(a.dtype, a.ndim) for a in arrays]),
            _hashable(fixed_args, fixed_kwargs),
        )
        signature = self._signatures.get(key)
        if signature is None:
            check_call(self.function, args, kwargs)
            fresh = _Signature(leaf_paths(tree, _argument_names(self.function)))
            signature = self._signatures.setdefault(key, fresh)

        def function(*a: Nest, **k: Nest) -> Nest:
            full = [fixed_args.get(i, v) for i, v in enumerate(a)]
            return self.function(*full, **k, **fixed_kwargs)

        function.__name__ = getattr(self.function, "__name__", "function")
        shapes = self._whole_shapes(arrays)
        variant = signature.find(shapes)
        if variant is None:
            types = [TensorType(dtype(a.dtype), shape) for a, shape in zip(arrays, shapes, strict=True)]
            with signature.lock:  # threads that come meanwhile wait for this program
                variant = signature.find(shapes)
                if variant is None:
                    variant = self._new_variant(signature, _Call(function, types, tree, shapes, numbers))
        variant.used = next(self._clock)
        check_ranges(variant.trace.ranges, arrays, signature.paths)
        return self._within_budget(signature, variant, shapes), arrays

    def _whole_shapes(self, arrays: Sequence[np.ndarray]) -> Shapes:
        """Shapes of the arguments; of those that are cut among ranks, the shapes of the whole."""
        shapes = [a.shape for a in arrays]
        for name, placements in (self.options.shardings or {}).items():
            number = int(name.removeprefix("arg")) if re.fullmatch(r"arg\d+", name) else len(shapes)
            for axis, placement in placements.items() if number < len(shapes) else ():
                if isinstance(placement, Shard) and placement.dim < len(shapes[number]):
                    whole = list(shapes[number])
                    whole[placement.dim] *= self.options.mesh.axes.get(axis, 1) if self.options.mesh else 1
                    shapes[number] = tuple(whole)
        return tuple(shapes)

    # -- new programs

    def _new_variant(self, signature: _Signature, call: _Call) -> _Variant:
        shapes = call.shapes
        names = self._dynamic.names(signature.paths, shapes)
        asked = set(names)
        taken = set(names.values())
        for place, old in signature.seen.items():
            size = shapes[place[0]][place[1]]
            if place not in names and size >= LEAST and old != {size}:
                names[place] = _symbol_name(signature.paths[place[0]], place[1], taken)
        why = _reason(signature, shapes, names.keys() - asked)
        variant, numbers = None, dict[Place, str]()  # sizes that decide bits, and how
        while symbolic := {place: name for place, name in names.items() if place not in numbers}:
            known = len(numbers)
            variant = self._with_symbols(signature, call, symbolic, numbers)
            if len(numbers) == known:
                break
        if variant is None:
            trace = trace_sizes(call.function, call.types, call.tree, {}, call.numbers)
            variant = _Variant(trace, self._compile(trace, shapes), (), shapes)
        told = {names[place]: _size_text(signature.paths, place) for place in names}
        specialized = {told.get(n, n): text for n, text in variant.trace.specialized.items()}
        specialized |= {told[names[place]]: text for place, text in numbers.items()}
        self.stats["traces"] += 1
        self.stats["why"].append("; ".join([why, *(f"{n} {text}" for n, text in specialized.items())]))
        progress.info(
            "jit of %s, program %d: %s", place_of(self.function), self.stats["traces"], self.stats["why"][-1]
        )
        self.stats["specialized"] |= specialized
        self.stats["answers"] += variant.trace.answers
        self._keep(signature, variant)
        for i, shape in enumerate(shapes):
            for j, size in enumerate(shape):
                signature.seen.setdefault((i, j), set()).add(size)
        return variant

    def _with_symbols(
        self, signature: _Signature, call: _Call, names: Mapping[Place, str], numbers: dict[Place, str]
    ) -> _Variant | None:
        """A program in which some sizes are symbols; None if the function, or the compiler, refuses that, or
        adds to those that must be `numbers`.
        """
        places = frozenset(names)
        if places in signature.refused:
            return None
        try:
            trace = trace_sizes(call.function, call.types, call.tree, names, call.numbers)
        except (
            Exception
        ) as e:  # code of the user may do anything with a symbol; without symbols it may not fail
            self._refuse(signature, places, e)
            return None
        shapes = None if trace.graph.symbols() else call.shapes
        choices = SizeChoices(sizes_of(trace.graph, call.shapes) or {})
        token = CHOICES.set(choices)
        try:
            program = self._compile(trace, call.shapes)
        except NumberNeeded as e:
            for i, j in names:
                if e.names & set(symbols(trace.graph.inputs[i].shape[j])):
                    numbers[i, j] = str(e)
            return None
        except RlxError as e:
            if shapes is not None:
                raise
            self._refuse(signature, places, e)
            return None
        finally:
            CHOICES.reset(token)
        guards = () if self.options.mesh else program.graph.constraints
        variant = _Variant(trace, program, guards, shapes, choices.made)
        if variant.serves(call.shapes):
            return variant
        self._refuse(signature, places, RlxError("its own guards do not hold for these sizes"))
        return None

    def _refuse(self, signature: _Signature, places: frozenset[Place], e: Exception) -> None:
        sizes = ", ".join(sorted(_size_text(signature.paths, place) for place in places))
        reason = f"{sizes} cannot be symbols, so each size is compiled separately: {e or type(e).__name__}"
        signature.refused[places] = reason
        self.stats["refused"].append(reason)

    def _keep(self, signature: _Signature, variant: _Variant) -> None:
        kept = (variant, *signature.variants)
        if len(kept) > MAX_PROGRAMS:
            oldest = min(kept[1:], key=lambda v: v.used)
            kept = tuple(v for v in kept if v is not oldest)
            if not signature.warned:
                signature.warned = True
                warn(self._too_many(signature, variant), JitWarning)
        signature.variants = kept

    def _too_many(self, signature: _Signature, variant: _Variant) -> str:
        reasons = [*variant.trace.specialized.values(), *signature.refused.values(), *variant.trace.answers]
        cause = f": {reasons[0]}" if reasons else ""
        return (
            f"{place_of(self.function)} has compiled more than {MAX_PROGRAMS} programs for arguments of one "
            f"kind{cause}. The least recently used one is dropped; pad the arguments to fewer sizes"
        )

    def _compile(self, trace: Trace, shapes: Shapes) -> CompiledProgram:
        if not trace.graph.outputs:
            raise TransformError(f"{place_of(self.function)} returns no array; return at least one")
        options, known = self.options, trace.graph.symbols()
        if options.assume is not None:
            options = replace(options, assume={n: size for n, size in options.assume.items() if n in known})
        elif options.budget is not None:  # what is done to fit it depends on sizes: those of this call
            options = replace(options, assume=sizes_of(trace.graph, shapes))
        token = READER.set(None)  # of a function around this one, which asks about other sizes
        try:
            return compile(trace.graph, options)
        finally:
            READER.reset(token)

    def _within_budget(self, signature: _Signature, variant: _Variant, shapes: Shapes) -> _Variant:
        """The variant; where these sizes take more than its budget, one compiled to fit them, which takes
        its place, or the refusal that they get."""
        if variant.shapes is not None or self.options.budget is None or self.options.assume is not None:
            return variant
        sizes = sizes_of(variant.trace.graph, shapes)
        assert sizes is not None, "the variant serves this call"
        try:
            variant.program.plan_for(sizes)
        except BudgetError:
            with signature.lock:
                program = self._compile(variant.trace, shapes)
                program.plan_for(sizes)  # refuses if nothing fits
                variant.program = program
        return variant


# -- arguments


class _Symbols:
    """Sizes that the user wants to be symbols from the first call on."""

    def __init__(self, function: Callable[..., Nest], dynamic: Dynamic) -> None:
        self.all = dynamic is True
        self.wanted: dict[str, Mapping[int, str]] = {}
        if isinstance(dynamic, bool):
            return
        known = _argument_names(function)
        if not isinstance(dynamic, Mapping) or not all(isinstance(v, Mapping) for v in dynamic.values()):
            raise ConfigError(
                f"jit: dynamic={dynamic!r}; give True, or axes by argument: {{'x': {{0: 'batch'}}}}"
            )
        for argument, axes in dynamic.items():
            name = known.get(argument, "") if isinstance(argument, int) else argument
            if name not in known.values():
                has = ", ".join(known.values()) or "none"
                raise ConfigError(f"jit: dynamic names {argument!r}, but the function's arguments are: {has}")
            self.wanted[name] = axes

    def names(self, paths: Sequence[str], shapes: Shapes) -> dict[Place, str]:
        """The symbols of a call; sizes 0 and 1 stay numbers."""
        out: dict[Place, str] = {}
        sizes: dict[str, tuple[int, str]] = {}
        taken = {name for axes in self.wanted.values() for name in axes.values()}
        for i, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
            axes = self.wanted.get(re.split(r"\W", path, maxsplit=1)[0], {})
            for j, name in axes.items():
                place = (i, j + len(shape) if j < 0 else j)
                if not 0 <= place[1] < len(shape):
                    raise InputError(f"jit: dynamic names axis {j} of {path}, which has rank {len(shape)}")
                size, text = shape[place[1]], _size_text(paths, place)
                other, first = sizes.setdefault(name, (size, text))
                if size != other:
                    raise InputError(f"jit: {name!r} is {other} in {first}, but {size} in {text}")
                if size >= LEAST:
                    out[place] = name
            for j, size in enumerate(shape):
                if self.all and size >= LEAST:
                    out[i, j] = _symbol_name(path, j, taken)
        return out


def _symbol_name(path: str, axis: int, taken: set[str]) -> str:
    """A name for a size that appears in plans: x_0 for x.shape[0]."""
    name = f"{re.sub(r'[^A-Za-z0-9]+', '_', path).strip('_')}_{axis}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _size_text(paths: Sequence[str], place: Place) -> str:
    return f"{paths[place[0]]}.shape[{place[1]}]"


def _reason(signature: _Signature, shapes: Shapes, symbols: set[Place]) -> str:
    """Why a program is compiled for a call."""
    if not signature.seen:
        return "first call of its dtypes, ranks and structure"
    texts = []
    for place, old in signature.seen.items():
        size = shapes[place[0]][place[1]]
        if old == {size}:
            continue
        was = " and ".join(map(str, sorted(old - {size})))
        kind = "" if size >= LEAST else " (0 and 1 have programs of their own)"
        kind = ", a symbol from now on" if place in symbols else kind
        texts.append(f"{_size_text(signature.paths, place)} is {size}, was {was}{kind}")
    return "; ".join(texts) or "no program is kept for these sizes"


def _argument_names(function: Callable[..., Nest]) -> dict[int, str]:
    """Place -> name of the arguments of a function; those of *args have none."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters_of(function) if p.kind in kinds]
    return dict(enumerate(names))


def _static_arguments(
    function: Callable[..., Nest], static: int | str | Sequence[int | str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places and names of static arguments; each may be given either way in a call."""
    static = (static,) if isinstance(static, (int, str)) else static
    parameters = parameters_of(function)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_places = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    open_names = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name for p in parameters}
    for s in static:
        known = (open_places or s < len(names)) and s >= 0 if isinstance(s, int) else open_names or s in own
        if not known:
            which = f"argument {s}" if isinstance(s, int) else repr(s)
            has = ", ".join(p.name for p in parameters) or "none"
            raise TransformError(f"jit: static names {which}, but the function's arguments are: {has}")
    places = {s if isinstance(s, int) else names.index(s) for s in static if isinstance(s, int) or s in names}
    named = {names[s] if isinstance(s, int) else s for s in static if isinstance(s, str) or s < len(names)}
    return tuple(sorted(places)), tuple(sorted(named))


def _hashable(args: dict[int, Nest], kwargs: dict[str, Nest]) -> Nest:
    key = tuple((place, _exact(value)) for place, value in (*args.items(), *sorted(kwargs.items())))
    try:
        hash(key)
    except TypeError:
        raise TransformError(
            "static arguments of jit must be hashable; pass arrays as ordinary arguments"
        ) from None
    return key


def _exact(value: Nest) -> Nest:
    """A key that distinguishes 1, 1.0 and True, and 0.0 from -0.0, as functions may."""
    if isinstance(value, tuple):
        return tuple(_exact(v) for v in value)
    return type(value), value.hex() if isinstance(value, float) else value
