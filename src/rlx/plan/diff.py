"""What differs between two plans: kernels, traffic, memory, and the decisions that went another way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from rlx.config import bytes_text
from rlx.cost.decision import Decision, decision_ops, ops_text, time_text
from rlx.plan.kernel_costs import KernelCost, kernel_name
from rlx.plan.lir import LirModule
from rlx.plan.predict import kernel_costs


def diff_plans(a: LirModule, b: LirModule) -> str:
    """A report of what changes from `a` to `b`; empty if they are the same plan.

    >>> import rlx
    >>> from rlx.api.compile import plan
    >>> def one(f):
    ...     g = rlx.Graph("g")
    ...     g.output("y", f(g.input("x", (64, 64), "f32")))
    ...     return plan(g, target="x86-64-v3")
    >>> print(diff_plans(one(rlx.ops.exp), one(lambda x: rlx.ops.sum(rlx.ops.exp(x)))))
    kernels   1 -> 1
    traffic   32 KiB -> 16 KiB
    predicted 748.6 ns -> 822.4 ns
    output    16 KiB -> 64 B
    - map: exp -> f32[64,64]
    + reduce: exp, reduce_sum -> f32[]
    outputs   y: f32[64,64] -> f32[]
    now kept: reduction exp + reduce_sum, +1.511 us (at ...)
    """
    if a.fingerprint() == b.fingerprint():
        return ""
    return "\n".join(_lines(a, b))


def _lines(a: LirModule, b: LirModule) -> Iterator[str]:
    costs = kernel_costs(a), kernel_costs(b)
    yield from _changed("target", a.target, b.target)
    for key in sorted({*a.options, *b.options}):
        yield from _changed(f"option {key}", a.options.get(key), b.options.get(key))
    for key in (*a.gate, *(k for k in b.gate if k not in a.gate)):
        yield from _changed(f"gate {key}", a.gate.get(key), b.gate.get(key))
    for key in (*a.again, *(k for k in b.again if k not in a.again)):
        yield from _changed(f"again {key}", a.again.get(key), b.again.get(key))
    yield from _changed("sizes", _sizes(a), _sizes(b))
    yield f"kernels   {len(costs[0])} -> {len(costs[1])}"
    moved = [sum(c.io.device_traffic_bytes for c in side) for side in costs]
    yield f"traffic   {bytes_text(moved[0])} -> {bytes_text(moved[1])}"
    took = [time_text(sum(c.picoseconds for c in side)).lstrip("+") for side in costs]
    yield f"predicted {took[0]} -> {took[1]}"
    for space, size in a.plan.sizes().items():
        other = b.plan.sizes()[space]
        if size != other:
            yield f"{space:<9} {bytes_text(size)} -> {bytes_text(other)}"
    yield from _kernel_lines(*costs)
    yield from _output_lines(a, b)
    yield from _decision_lines(a, b)


def _changed(what: str, old: object, new: object) -> Iterator[str]:
    if old != new:
        yield f"{what}: {old} -> {new}"


def _sizes(module: LirModule) -> str:
    return ", ".join(f"{s}={n}" for s, n in sorted(module.plan.binding.items()))


def _kernel_lines(before: list[KernelCost], after: list[KernelCost]) -> Iterator[str]:
    """Kernels that went and came, by what they are; equal ones are counted."""
    old, new = (Counter(f"{kernel_name(c.node)} -> {c.node.type}" for c in side) for side in (before, after))
    for sign, counts in (("-", old - new), ("+", new - old)):
        for name, n in counts.items():
            yield f"{sign} {name}" + (f"  ({n} times)" if n > 1 else "")


def _output_lines(a: LirModule, b: LirModule) -> Iterator[str]:
    for kind in ("inputs", "outputs"):
        sides = [
            {name: str(m.mir.nodes[node].type) for name, node in getattr(m.plan.io, kind)} for m in (a, b)
        ]
        for name in (*sides[0], *(n for n in sides[1] if n not in sides[0])):
            old, new = sides[0].get(name), sides[1].get(name)
            if old != new:
                yield f"{kind:<9} {name}: {old or 'none'} -> {new or 'none'}"


def _decision_lines(a: LirModule, b: LirModule) -> Iterator[str]:
    """Candidates that only one of the plans has kept, and what the other one says about them."""
    old, new = _decisions(a), _decisions(b)
    lost, won = _only_kept_in(old, new), _only_kept_in(new, old)
    told: set[int] = set()
    for word, here, there, plan in (
        ("no longer kept", lost, new, "the second plan"),
        ("now kept", won, old, "the first plan"),
    ):
        for one in here:
            if id(one.decision) in told:
                continue
            d, other = one.decision, _counterpart(one, there)
            at = f" (at {', '.join(d.where[:2])})" if d.where else ""
            gain = time_text(d.net_ps)
            if other is not None and here is lost and other in won:  # the same place, another set of ops
                told.add(id(other.decision))
                gain += f" -> {time_text(other.decision.net_ps)}"
                yield f"kept otherwise: {d.rule} {ops_text(one.ops)} -> {ops_text(other.ops)}, {gain}{at}"
                continue
            yield f"{word}: {d.rule} {ops_text(one.ops)}, {gain}{at}"
            if other is not None:
                verdict = "keeps" if other.decision.verdict else "refuses"
                name = f"{other.decision.rule} {ops_text(other.ops)}"
                yield f"    {plan} {verdict} {name}: {other.decision.reason}"


def _only_kept_in(here: Sequence[_Told], there: Sequence[_Told]) -> list[_Told]:
    """What one plan has kept and the other has not; equal ones cancel each other one by one."""
    kept = Counter(told.key for told in there if told.decision.verdict)
    out = []
    for told in here:
        if told.decision.verdict:
            kept[told.key] -= 1
            if kept[told.key] < 0:
                out.append(told)
    return out


class _Told(NamedTuple):
    """A decision, and its ops by name: ids differ between plans."""

    decision: Decision
    ops: tuple[str, ...]

    @property
    def key(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return self.decision.rule, self.ops, self.decision.where


def _decisions(module: LirModule) -> list[_Told]:
    earlier = module.trace.decisions if module.trace is not None else ()
    return [_Told(d, decision_ops(d, module.unfused)) for d in (*earlier, *module.decisions)]


def _counterpart(told: _Told, others: Sequence[_Told]) -> _Told | None:
    """What the other plan decided about the same ops: of those that begin alike, the one most alike."""

    def alike(other: _Told) -> tuple[int, int]:
        common = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(told.ops, other.ops, strict=False))
        )
        same_place = len({*told.decision.where} & {*other.decision.where})
        return same_place, common

    near = [o for o in others if o.ops[:1] == told.ops[:1] and alike(o)[0]]
    return max(near, key=lambda o: (alike(o), not o.decision.verdict), default=None)
