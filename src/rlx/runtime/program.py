"""A compiled program: call it, bind it to buffers, ask what it will cost, look inside."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.codegen.cpu.kernels import KernelSet
from rlx.crash_report import found_bug
from rlx.errors import GuardError, InputError, InternalError, UnsupportedError
from rlx.ir.bind import as_given, check_array
from rlx.ir.dim import compile_dims
from rlx.ir.dtype import ParamValue
from rlx.ir.graph import Node
from rlx.ir.later import later
from rlx.ir.op import Role
from rlx.ir.types import type_symbols
from rlx.plan.lir import LirBufferPlan, LirModule
from rlx.runtime.bound import apart, by_name, check_bound, in_order
from rlx.runtime.context import Context
from rlx.runtime.debug import check_mode
from rlx.runtime.entry import SizeEntry, entry_of
from rlx.runtime.execution import Execution, Given
from rlx.runtime.exported import Exported, Page
from rlx.runtime.memory import OutputPool
from rlx.runtime.native.driver import RecordError
from rlx.runtime.native.lane import Lanes
from rlx.runtime.native.quick import is_quick, wait_for_code
from rlx.runtime.sizes import Sizes
from rlx.runtime.stream import Stream, handles_for
from rlx.runtime.trace import Run, best_times, spans
from rlx.runtime.variants import Variants
from rlx.runtime.weights import Params, Weights
from rlx.target.cpu import host_text

if TYPE_CHECKING:
    from rlx.driver.buffer import Buffer, BufferHandle
    from rlx.runtime.store.origin import Origin
    from rlx.runtime.stream import Stream

KEPT_CONTEXTS = 8  # bindings whose buffers are kept for the next run


class CompiledProgram(Execution):
    """What `rlx.compile` returns. Runs are re-entrant: several threads may call it at once."""

    moves_sizes = True  # a context can run at other sizes of size inputs
    quick = True  # small runs need not be executed step by step
    has_variants = True  # runs whose sizes broadcast in other ways get their own programs

    def __init__(
        self,
        lir: LirModule,
        kernels: KernelSet,
        code: Any,
        threads: int,
        debug: str | None = None,
        weights: Weights | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.lir, self.kernels, self._code, self.threads = lir, kernels, code, threads
        self.debug = check_mode(debug)
        self._output_memory = OutputPool()
        graph = self.graph = lir.outline
        self.inputs: list[Node] = graph.inputs
        self.outputs: list[Node] = list(graph.outputs.values())
        self.input_names = [n.attrs["name"] for n in self.inputs]
        self.output_names = list(graph.outputs)
        self.entries = [entry_of(n) for n in self.inputs]
        self._symbols = graph.symbols()
        given = {s for n in (*self.inputs, *graph.state_inputs.values()) for s in type_symbols(n.type)}
        self._found_later = [s for s in self._symbols if s not in given]
        self._free: dict[tuple[int, ...], list[Context]] = {}
        self._lanes = Lanes()
        self._plans: dict[tuple[int, ...], LirBufferPlan] = {}
        self._lock = threading.Lock()
        self._generation = 0  # of weights: contexts hold their addresses
        self._weights = weights or Weights(lir)
        # Debug modes look at every byte of a value: it gets no more than it needs.
        sized = bool(self._found_later) or any(isinstance(e, SizeEntry) for e in self.entries)
        self._sizes = Sizes(lir, kernels) if sized and self.moves_sizes and debug is None else None
        self._handles: dict[str, BufferHandle] | None = None  # states bound at compile, which survive runs
        self._turn = threading.Lock()  # runs that share those states come one after the other
        # Runs that no size, state or check is decided in may be quick.
        self._has_lanes = self.quick and debug is None and not graph.states and not sized
        self.origin = origin
        self._variants: Variants | None = None  # once there is one
        self.notes: list[str] = []  # what a user should know about how this program came to be
        dims = [d for k in kernels.kernels.values() for d in (*k.dims, k.scratch_per_thread)]
        self._dims = compile_dims(dims, self._symbols)

    def __repr__(self) -> str:
        stats = self.stats
        counts = [
            (stats["kernels"], "kernel"),
            (len(stats["host_thunks"]), "host thunk"),
            (self.threads, "thread"),
        ]
        told = [f"{n} {what}{'s' * (n != 1)}" for n, what in counts if n or what == "kernel"]
        told.insert(-1, stats.get("device") or self.lir.target)
        return f"<program {self.graph.name!r}{self.graph.signature()}, {', '.join(told)}>"

    # -- facts

    @property
    def decisions(self) -> Any:
        """Every fusion decision: what was joined or refused, and why."""
        return self.lir.decisions

    @property
    def has_run(self) -> bool:
        """Whether a run is over."""
        return bool(self._free or self._lanes)

    @property
    def stats(self) -> dict[str, Any]:
        """Sizes and counts; host thunks by name with the reason."""
        thunks = [
            {"node": t.node, "op": self.graph.nodes[t.node].op.name, "why": t.why}
            for t in self.kernels.thunks.values()
        ]
        return {
            "kernels": len(self.kernels.kernels) + sum(1 for _ in self.kernels.in_bodies()),
            "distinct_kernels": self.kernels.distinct,
            "host_thunks": thunks,
            "threads": self.threads,
            "target": self.lir.target,
            "code": "quick" if is_quick(self._code) else "best",
            "weights": sum(len(m) for m in self._weights.everything.values()),
            "budget": self.lir.planner.fitted,
            "streaming": self._weights.stats,
            "variants": [dict(fixed) for fixed in self._variants.made] if self._variants else [],
        }

    @property
    def native_share(self) -> str:
        """In one line, how much of the program runs as native code.

        >>> import rlx
        >>> g = rlx.Graph("double")
        >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
        >>> rlx.compile(g).native_share
        'all of its 1 kernels are native'
        """
        facts = self.stats
        thunks, kernels = facts["host_thunks"], facts["kernels"]
        if not thunks:
            return f"all of its {kernels} kernels are native"
        names = ", ".join(sorted({t["op"] for t in thunks}))
        return f"{kernels} of its {kernels + len(thunks)} kernels are native; the host computes {names}"

    def memory(self, binding: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes per space for a binding, before running."""
        plan = self.plan_for(binding or {})
        return {**plan.sizes(), "scratch": self._scratch(plan)}

    def _scratch(self, plan: LirBufferPlan) -> int:
        """Bytes that kernels need besides their operands, for all threads."""
        values = self._dims([plan.binding[s] for s in self._symbols])
        at, most = 0, 0
        for k in self.kernels.kernels.values():
            at += len(k.dims) + 1
            most = max(most, values[at - 1])
        most = max(most, self.kernels.scratch_in_bodies(plan))
        return -(-most // 64) * 64 * self.threads

    def plan_for(self, binding: Mapping[str, int]) -> LirBufferPlan:
        """The plan for a binding; known ones are remembered."""
        sizes = self.lir.planner.completed(binding)  # the caller need not name what data will decide
        missing = [s for s in self._symbols if s not in sizes]
        if missing:
            raise InputError(f"symbol {missing[0]!r} needs a size, for example {{{missing[0]!r}: 128}}")
        return self._plan_for(binding, sizes)

    def _plan_for(self, known: Mapping[str, int], sizes: Mapping[str, int]) -> LirBufferPlan:
        """The plan for `sizes`, of which those that are `known` meet their guards."""
        key = self._key(sizes)
        plan = self._plans.get(key)
        if plan is None:
            room = sizes if self._sizes is None else {**sizes, **self._sizes.room_at(sizes)}
            plan = self._plans[key] = self.lir.planner.plan(known, room)
        return plan

    def _key(self, binding: Mapping[str, int]) -> tuple[int, ...]:
        """What decides about the plan: sizes, or the room for them."""
        if self._sizes is None:
            return tuple([binding[s] for s in self._symbols])
        room = self._sizes.room_at(binding)
        return tuple([room[s] if s in room else binding[s] for s in self._symbols])

    def explain(self, measure: bool = False, binding: Mapping[str, int] | None = None) -> str:
        """What the program does, why it was fused so, and where its memory goes.

        It is shown for the sizes in `binding`, else for the assumed ones. With `measure`, kernels are timed
        with random inputs, and both sides of the largest fusion decisions are built and timed.
        """
        from rlx.plan.explain import explain  # start time

        if not isinstance(measure, bool):
            raise InputError("give sizes by name: explain(binding={'n': 128}); measure is True or False")
        if measure:
            self.wait_for_code()
        lir = self.lir if binding is None else self.lir.specialize(binding)
        times = later().measuring.kernel_times(self, lir.plan.binding) if measure else {}
        page = explain(lir, self._host_reasons(), self._scratch(lir.plan), host_text(), times)
        page += "".join(f"\ncode: {line}\n" for line in self.kernels.shared_code())
        if is_quick(self._code):
            page += "\ncode: not optimised yet; a thread makes the best code, which has the same bits\n"
        if not measure:
            return page
        return f"{page}\n{later().measuring.measured(self.lir, self.threads)}\n"

    def wait_for_code(self) -> None:
        """Return when runs use the best code: programs of `rlx.load` may begin with unoptimised code.

        >>> import rlx
        >>> g = rlx.Graph("double")
        >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
        >>> program = rlx.compile(g, background=True)
        >>> program.wait_for_code()
        >>> program.stats["code"]
        'best'
        """
        wait_for_code(self._code)

    def _host_reasons(self) -> dict[int, str]:
        """Why nodes are computed on the host, by their ids."""
        return {id: t.why for id, t in self.kernels.thunks.items()}

    def why_not(self, a: int, b: int) -> str:
        """Why two nodes, by their numbers before fusion, are not one kernel, or that they are."""
        answer: str = self.lir.decisions.why_not(a, b)
        return answer

    def describe(self, node: Node) -> str:
        """A kernel's ops, for messages."""
        whole = self.lir.mir.nodes[node.id]
        inside = whole.bodies[0].nodes if whole.op.role is Role.REGION else [whole]
        ops = [n.op.name for n in inside if n.op.role is Role.COMPUTE]
        return f"%{node.id} ({' + '.join(ops)})"

    def save(self, path: str | os.PathLike[str], targets: Sequence[str] = ()) -> None:
        """Write plan, native code and weights to one file, which `rlx.load` maps; `targets` adds more code.

        >>> import tempfile, numpy as np, rlx
        >>> g = rlx.Graph("double")
        >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rlx.compile(g).save(folder + "/double.rlx")
        ...     rlx.load(folder + "/double.rlx")(np.ones(2, np.float32))
        array([2., 2.], dtype=float32)
        """
        from rlx.runtime.store.save import save  # start time

        save(self, path, targets)

    def export(
        self,
        folder: str | os.PathLike[str],
        kind: str = "c",
        *,
        bind: Mapping[str, tuple[int, int]] | None = None,
        name: str | None = None,
        target: str | None = None,
        embed: bool = False,
        page: bool | Page = False,
    ) -> Exported:
        """Write the program to a folder, to run without Python: for C ("c") or WebAssembly ("wasm").

        `bind` gives the smallest and largest size of symbols; others go up to what is assumed, at least 128.
        `name` begins all names of the export, `target` is a target other than the program's own. With
        `embed`, weights are part of the C library instead of a file. With `page`, a web page that runs the
        model is written next to the WebAssembly module. Files appear in the folder when all are written.

        >>> import tempfile, rlx
        >>> g = rlx.Graph("twice")
        >>> g.output("y", g.input("x", (4,), "f32") * 2.0)
        >>> with tempfile.TemporaryDirectory() as there:
        ...     made = rlx.compile(g).export(there)
        >>> "twice.h" in made.files
        True
        """
        made: Exported = later().export(
            self, folder, kind, bind=bind, name=name, target=target, embed=embed, page=page
        )
        return made

    def __reduce__(self) -> tuple[Callable[..., CompiledProgram], tuple[bytes, str, int, str | None]]:
        """Pickle, copy and processes that are spawned take a program by the bytes of its file.

        The copy is a separate program. This user's processes run its code as it is, without a compiler.

        >>> import pickle, numpy as np, rlx
        >>> g = rlx.Graph("double")
        >>> g.output("y", g.input("x", ("n",), "f32") * 2.0)
        >>> pickle.loads(pickle.dumps(rlx.compile(g)))(np.ones(2, np.float32))
        array([2., 2.], dtype=float32)
        """
        if self._handles is not None:
            raise UnsupportedError(
                f"program {self.graph.name!r} keeps its states in memory of this process and cannot be "
                "copied or pickled; compile it without states= and bind them in the copy"
            )
        with tempfile.TemporaryDirectory(prefix="rlx-pickle-") as folder:
            path = os.path.join(folder, "program.rlx")
            self.save(path)
            with open(path, "rb") as file:
                return later().restore, (file.read(), self.lir.target, self.threads, self.debug)

    @property
    def param_values(self) -> Mapping[str, np.ndarray]:
        """The values that params have now. Those that are in memory only as kernels read them, or in a file,
        are computed or read when they are asked for."""
        return Params(self._weights.values)

    @property
    def stored_params(self) -> Mapping[str, ParamValue]:
        """The same values; some are lazy arrays."""
        return self._weights.values

    @property
    def weight_memory(self) -> Mapping[int, np.ndarray]:
        """Bytes of every weight by node id, as kernels read them."""
        return self._weights.everything

    def set_param(self, name: str, value: np.ndarray) -> None:
        """Give a parameter a value; derived weights follow."""
        with self._lock:
            self._weights.set(name, value)
            self._free.clear()
            self._lanes.clear()
            self._generation += 1
            for variant in self._variants.made.values() if self._variants else ():
                if name in variant.stored_params:
                    variant.set_param(name, value)

    # -- running

    def run(self, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Outputs by name for a dict of inputs.

        The arrays are the caller's: no later run changes them. Memory of outputs of 1 MiB or more is used
        again by later runs of this program once no array refers to it. `bind` writes into your own arrays.
        """
        found = self._lanes.run(inputs, self)
        if found is not None:
            return found
        given = in_order(self, inputs)
        return dict(zip(self.output_names, self._run(given), strict=True))

    def __call__(self, *inputs: object) -> Any:
        """Outputs for inputs in order: one array, or a tuple."""
        found = self._lanes.run(by_name(self, inputs), self)
        out = self._run(inputs) if found is None else list(found.values())
        return out[0] if len(out) == 1 else tuple(out)

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A function that runs the program on fixed buffers, with a few microseconds of overhead.

        Arrays must be contiguous; every call reads the inputs' and writes the outputs' present memory. An
        input may be over outputs: it is copied before anything is written.
        """
        if self._host_reasons() or self.graph.states or self._found_later:
            raise InputError(
                f"program {self.graph.name!r} cannot be bound, as it has host thunks, "
                "states or data-dependent sizes; use run"
            )
        binding = check_bound(self, inputs, outputs, contiguous=True)
        read, written = [inputs[n] for n in self.input_names], [outputs[n] for n in self.output_names]
        used = apart(read, written)
        copies = [(copy, array) for copy, array in zip(used, read, strict=True) if copy is not array]
        context = self._make_context(binding)
        for node, array in zip((*self.inputs, *self.outputs), (*used, *written), strict=True):
            context.connect(node.id, array)
        keep = (used, written, self, context)  # all that the tables point to
        native = [step.program.caller() for step in context.steps if step.program is not None]

        def run() -> None:
            for copy, array in copies:
                copy[...] = array
            try:
                for call in native:
                    call()
            except RecordError as e:
                raise keep[2].kernel_error(e, keep[3].plan.binding) from None

        def run_steps() -> None:
            for copy, array in copies:
                copy[...] = array
            watch = keep[2]._watch(context)
            with keep[2]._weights.running():
                for number, step in enumerate(context.steps):
                    keep[2]._run_step(context, step, number, watch)

        plain = self.debug is None and not self._weights.watched and len(native) == len(context.steps)
        return run if plain else run_steps

    def _run(self, given: Sequence[object], states: dict[str, np.ndarray] | None = None) -> list[np.ndarray]:
        try:
            if states is None and self._handles is not None:
                with self._turn:
                    kept = {name: self.state_memory(h) for name, h in self._handles.items()}
                    return self._run_with(given, kept)
            return self._run_with(given, states)
        except Exception as e:
            bug = self.found_bug(e)
            if bug is None:
                raise
            raise bug from e

    def found_bug(self, error: Exception) -> InternalError | None:
        """The report of an error during a run; None if it is not a bug of RLX and passes."""
        source = self.lir.mir if self.origin is None else self.origin.graph
        return found_bug(f"a run of {self.graph.name!r}", error, source)

    def _run_with(
        self, given: Sequence[object], states: Mapping[str, np.ndarray | Buffer] | None
    ) -> list[np.ndarray]:
        binding: dict[str, int] = {}
        arrays = [entry(value, binding) for entry, value in zip(self.entries, given, strict=True)]
        states = self.initial_states(binding) if states is None else states
        variant = self._variants.known(binding) if self._variants is not None else None
        if variant is None:
            try:
                context = self.acquire(binding)
            except GuardError:
                variant = self._variant(binding)
                if variant is None:
                    raise
        if variant is not None:
            return variant._run_with(given, states)
        try:
            outputs = self.execute(context, Given(arrays, states, binding))
        except BaseException:
            self.release(context)
            raise
        if not (self._has_lanes and self._keep_lane(context, arrays, outputs)):
            self.release(context)
        return outputs

    def _keep_lane(self, context: Context, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> bool:
        """Keep the context of a run for quick ones of the same sizes, if that is possible."""
        with self._lock:
            if context.generation != self._generation or self._weights.watched:
                return False
            given = list(zip(self.input_names, inputs, strict=True))
            return self._lanes.open(context, given, list(zip(self.output_names, outputs, strict=True)))

    def _variant(self, binding: Mapping[str, int]) -> CompiledProgram | None:
        """The program for sizes that break a guard, because one of them is 1 and broadcasts; None if these
        sizes do not fit in any way."""
        if not self.has_variants or self._weights.ring is not None:
            return None
        if self._variants is None:
            with self._lock:
                self._variants = self._variants or Variants(CompiledProgram)
        return self._variants.find(self, binding)

    def stream(
        self,
        inputs: Mapping[str, object] | None = None,
        states: Mapping[str, BufferHandle] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Stream:
        """A stream of runs with its own states, which survive from step to step.

        `inputs` are those declared `once`; `states` gives memory to some or all states, the others start
        anew; `sizes` says what symbols in the shapes of states are, if the first step is to find them there.

        >>> import numpy as np, rlx
        >>> g = rlx.Graph("sums")
        >>> total = g.state("total", (), "f32") + g.input("x", (), "f32")
        >>> g.set_state("total", total)
        >>> g.output("y", total * 1.0)
        >>> program = rlx.compile(g)
        >>> one, other = program.stream(), program.stream()
        >>> [float(s.step({"x": np.float32(x)})["y"]) for s, x in ((one, 1), (one, 2), (other, 5), (one, 3))]
        [1.0, 3.0, 5.0, 6.0]
        """
        return Stream(self, inputs or {}, states or {}, sizes or {})

    def bind_states(self, handles: Mapping[str, BufferHandle]) -> None:
        """Let runs read and replace states in the memory of handles, so that they survive.

        States without a handle here get one, too: see `states`.
        """
        self._handles = handles_for(self, handles, {})

    @property
    def states(self) -> Mapping[str, BufferHandle]:
        """The states that runs share, by name; none unless they were bound at compile."""
        return self._handles or {}

    state_device = "cpu"  # where handles of states have their memory

    def state_memory(self, handle: BufferHandle) -> np.ndarray | Buffer:
        """The memory of a state as `execute` takes it."""
        return handle.buffer.numpy()

    def initial_states(self, binding: Mapping[str, int]) -> dict[str, np.ndarray]:
        """What states hold before the first run."""
        nodes = self.graph.state_inputs.items()
        return {name: self.initial_state(name, n.tensor.bind(dict(binding))) for name, n in nodes}

    def initial_state(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """What one state holds before the first run: its own copy."""
        value, kind = self.graph.state_values.get(name), self.graph.state_inputs[name].dtype.np
        return np.zeros(shape, kind) if value is None else np.array(value, kind).reshape(shape)

    # -- contexts: one per concurrent run and binding, from a pool

    def acquire(self, binding: dict[str, int], last: Context | None = None) -> Context:
        """A context for these sizes: the `last` one if it fits, else from the pool or new."""
        sizes = self._until_found(binding)
        key, generation = self._key(sizes), self._generation
        if self._sizes is not None:
            self._sizes.check(binding)
        if last is None or last.key != key or last.generation != generation:
            with self._lock:
                free = self._free.get(key)
                last = free.pop() if free else self._lanes.context(key)
            if last is None:
                last = self._make_context(binding)
                last.generation = generation
                return last
        if self._sizes is not None:
            last.move_to(sizes)
        return last

    def release(self, context: Context) -> None:
        """Give a context back to the pool, unless weights have changed since."""
        key = context.key
        context.connected = None
        with self._lock:
            if context.generation != self._generation:
                return
            self._free.setdefault(key, []).append(context)
            while len(self._free) > KEPT_CONTEXTS:
                self._free.pop(next(k for k in self._free if k != key))

    def _heap(self, plan: LirBufferPlan) -> np.ndarray | None:
        """Memory that other ranks see too, for the heap space of a plan."""
        return None

    def _native_meeting(self, context: Context, id: int) -> tuple[int, np.ndarray] | None:
        """Kernel of a collective that needs no host, and the table that it reads."""
        return None

    def _make_context(self, binding: Mapping[str, int], profile: bool = False) -> Context:
        sizes = self._until_found(binding)
        plan = self._plan_for(binding, sizes)
        values = self._dims([plan.binding[s] for s in self._symbols])
        made = Context(
            self.lir,
            self.kernels,
            self._code,
            plan,
            values,
            self._weights.memory,
            self.threads,
            streamed=self._weights,
            one_by_one=self.debug is not None,
            profile=profile,
            heap=self._heap(plan),
            sizes=self._sizes,
            meet=self._native_meeting,
        )
        made.move_to(sizes)
        return made

    def trace(self, inputs: Mapping[str, object], rounds: int = 1) -> list[Run]:
        """Run several times and say when every kernel ran, on which thread."""
        self.wait_for_code()
        given = [
            np.asarray(as_given(n.tensor, inputs[name]), order="C")
            for name, n in zip(self.input_names, self.inputs, strict=True)
        ]
        known: dict[str, int] = {}
        for node, array in zip(self.inputs, given, strict=True):
            check_array(node.tensor, array, known, f"input {node.attrs['name']!r}")
        context, runs = self._make_context(known, profile=True), []
        for _ in range(rounds):
            states, start = self.initial_states(known), time.perf_counter_ns()
            self.execute(context, Given(given, states, dict(known)))
            runs.append(Run(start, time.perf_counter_ns(), spans(context)))
        return runs

    def profile(self, inputs: Mapping[str, object], rounds: int = 10) -> list[tuple[Node, float]]:
        """(kernel, microseconds on thread 0) in schedule order: the best of several rounds."""
        return [(self.graph.nodes[id], t) for id, t in best_times(self.trace(inputs, rounds)).items()]
