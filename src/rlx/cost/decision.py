"""Every fusion that was considered is a record: what it would do, its price, the verdict and the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, overload

from rlx.config import bytes_text
from rlx.cost.gate import IoFusionGate
from rlx.cost.profile import GraphIoProfile, fusion_benefit
from rlx.errors import FormatError
from rlx.ir.graph import Graph
from rlx.records import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One candidate: the nodes it unites, IO before and after, and why it was kept or refused.

    `region` holds the ids of all nodes that would be one kernel, in ascending order, `ops` their names where
    a graph to look them up in is not at hand. `pinned` says that the user decided; the score is then recorded
    but did not count.
    """

    region: tuple[int, ...]
    before: GraphIoProfile
    after: GraphIoProfile
    score_ps: int
    compute_ps_added: int
    verdict: bool
    reason: str
    where: tuple[str, ...] = ()
    pinned: bool = False
    rule: str = "fuse"
    ops: tuple[str, ...] = field(default=(), compare=False)

    @property
    def net_ps(self) -> int:
        """IO saved minus compute added: what the verdict is about."""
        return self.score_ps - self.compute_ps_added

    @property
    def rank(self) -> tuple[int, tuple[int, ...], str]:
        """Sorts candidates best first, in a total order: equal gains are ordered by region and rule."""
        return (-self.net_ps, self.region, self.rule)

    def __str__(self) -> str:
        mark = ("keep" if self.verdict else "refuse") + (" (pinned)" if self.pinned else "")
        nodes = " ".join(f"%{node}" for node in self.region) or " + ".join(self.ops)
        price = f"io {time_text(self.score_ps)}, compute {time_text(-self.compute_ps_added)}"
        at = f" (at {', '.join(self.where)})" if self.where else ""
        return f"{mark} {self.rule} [{nodes}]: {price}: {self.reason}{at}"

    def to_json(self) -> dict[str, object]:
        """A dict of plain JSON values; `from_json` reads it back.

        >>> d = Decision((1, 2), GraphIoProfile(2), GraphIoProfile(1), 200_000, 0, True, "saves 1 launch")
        >>> Decision.from_json(d.to_json()) == d
        True
        """
        return {
            "rule": self.rule,
            "region": list(self.region),
            "before": list(self.before.as_tuple()),
            "after": list(self.after.as_tuple()),
            "score_ps": self.score_ps,
            "compute_ps_added": self.compute_ps_added,
            "verdict": self.verdict,
            "pinned": self.pinned,
            "reason": self.reason,
            "where": list(self.where),
            "ops": list(self.ops),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Decision:
        """The record that `to_json` wrote."""
        try:
            return Decision(
                region=tuple(int(node) for node in data["region"]),
                before=GraphIoProfile(*map(int, data["before"])),
                after=GraphIoProfile(*map(int, data["after"])),
                score_ps=int(data["score_ps"]),
                compute_ps_added=int(data["compute_ps_added"]),
                verdict=bool(data["verdict"]),
                reason=str(data["reason"]),
                where=tuple(str(place) for place in data["where"]),
                pinned=bool(data["pinned"]),
                rule=str(data["rule"]),
                ops=tuple(str(op) for op in data.get("ops", ())),
            )
        except (KeyError, TypeError, ValueError) as cause:
            raise FormatError(f"not a fusion decision: {cause!r}; write it with Decision.to_json") from cause


def decide(
    gate: IoFusionGate,
    region: Iterable[int],
    before: GraphIoProfile,
    after: GraphIoProfile,
    compute_ps_added: int = 0,
    *,
    rule: str = "fuse",
    where: Sequence[str] = (),
    pin: bool | None = None,
    ops: Sequence[str] = (),
) -> Decision:
    """Score a candidate and say why it is kept or refused. `pin` overrules the gate.

    >>> gate = IoFusionGate(200, 2_000, 25, 25, True, 80_000, 100)
    >>> apart, fused = GraphIoProfile(2, 0, 0, 80_000), GraphIoProfile(1, 0, 0, 40_000)
    >>> print(decide(gate, (7, 4), apart, fused, rule="epilogue"))
    keep epilogue [%4 %7]: io +1.8 us, compute 0 ns: saves 1 launch, 39.1 KiB of traffic
    """
    score = gate.score_ps(fusion_benefit(before, after))
    verdict = gate.accepts(score, compute_ps_added) if pin is None else pin
    return Decision(
        region=tuple(sorted(set(region))),
        before=before,
        after=after,
        score_ps=score,
        compute_ps_added=compute_ps_added,
        verdict=verdict,
        reason=_reason(gate, before, after, score, compute_ps_added, verdict, pin is not None),
        where=tuple(where),
        pinned=pin is not None,
        rule=rule,
        ops=tuple(ops),
    )


class DecisionLog(Sequence[Decision]):
    """All decisions of a compilation, in the order they were taken.

    >>> log = DecisionLog()
    >>> log.add(Decision((1, 2), GraphIoProfile(2), GraphIoProfile(1), 200_000, 900_000, False, "recomputes"))
    >>> print(log.why_not(2, 1))
    refuse fuse [%1 %2]: io +200 ns, compute -900 ns: recomputes
    >>> print(log.why_not(1, 3))
    %1 and %3 were never considered together: no rule matches a region with both
    """

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        self._decisions: list[Decision] = []
        self._about: dict[int, list[int]] = {}  # node id -> positions of the decisions that name it
        for decision in decisions:
            self.add(decision)

    def add(self, decision: Decision) -> None:
        """Append a record."""
        for node in decision.region:
            self._about.setdefault(node, []).append(len(self._decisions))
        self._decisions.append(decision)

    def about(self, *nodes: int) -> tuple[Decision, ...]:
        """Every decision whose region holds all of `nodes`, in order."""
        if not nodes:
            return tuple(self._decisions)
        common = set(self._about.get(nodes[0], ()))
        for node in nodes[1:]:
            common.intersection_update(self._about.get(node, ()))
        return tuple(self._decisions[position] for position in sorted(common))

    def why_not(self, a: int, b: int) -> str:
        """Why nodes `a` and `b` are not one kernel, or that they are.

        A kept region answers before a refused one; among refusals the one that came nearest to paying.
        """
        candidates = self.about(a, b)
        kept = [decision for decision in candidates if decision.verdict]
        if kept:
            return f"%{a} and %{b} are one kernel: {kept[-1]}"
        if candidates:
            return str(min(candidates, key=lambda decision: decision.rank))
        return f"%{a} and %{b} were never considered together: no rule matches a region with both"

    def kept(self) -> tuple[Decision, ...]:
        """The decisions that fused."""
        return tuple(decision for decision in self._decisions if decision.verdict)

    def refused(self) -> tuple[Decision, ...]:
        """The decisions that did not fuse."""
        return tuple(decision for decision in self._decisions if not decision.verdict)

    def largest(self, count: int) -> tuple[Decision, ...]:
        """The decisions with most time at stake either way, largest first."""
        return tuple(sorted(self._decisions, key=lambda d: (-abs(d.net_ps), d.region, d.rule))[:count])

    def to_json(self) -> list[dict[str, object]]:
        """All records in order, as plain JSON values."""
        return [decision.to_json() for decision in self._decisions]

    @staticmethod
    def from_json(data: Iterable[Mapping[str, Any]]) -> DecisionLog:
        """The log that `to_json` wrote."""
        return DecisionLog(Decision.from_json(item) for item in data)

    def __len__(self) -> int:
        return len(self._decisions)

    @overload
    def __getitem__(self, index: int) -> Decision: ...

    @overload
    def __getitem__(self, index: slice) -> list[Decision]: ...

    def __getitem__(self, index: int | slice) -> Decision | list[Decision]:
        return self._decisions[index]

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions)

    def __str__(self) -> str:
        return "\n".join(map(str, self._decisions))


def decision_ops(decision: Decision, unfused: Graph | None) -> tuple[str, ...]:
    """Names of the ops that a decision is about: its own record, or what its ids mean before fusion."""
    if decision.ops or unfused is None:
        return decision.ops
    return tuple(unfused.nodes[i].op.name for i in decision.region if i < len(unfused))


def ops_text(ops: Sequence[str]) -> str:
    """Ops in a row, the middle of long ones left out.

    >>> ops_text(["conv", "add", "mul", "maximum", "cast"])
    'conv + ... + maximum + cast'
    """
    return " + ".join(ops if len(ops) <= 4 else (ops[0], "...", *ops[-2:]))


def time_text(picoseconds: int) -> str:
    """A signed time in the unit that reads best.

    >>> time_text(1_800_000), time_text(-25_000_000_000), time_text(0), time_text(40)
    ('+1.8 us', '-25 ms', '0 ns', '+0.04 ns')
    """
    for unit, scale in (("s", 10**12), ("ms", 10**9), ("us", 10**6)):
        if abs(picoseconds) >= scale:
            return f"{picoseconds / scale:+.4g} {unit}"
    return f"{picoseconds / 1000:+.4g} ns" if picoseconds else "0 ns"


def _reason(
    gate: IoFusionGate,
    before: GraphIoProfile,
    after: GraphIoProfile,
    score: int,
    compute_ps_added: int,
    verdict: bool,
    pinned: bool,
) -> str:
    benefit = fusion_benefit(before, after)
    launches, waits = benefit.launches_saved, benefit.sync_points_saved
    readback, traffic = benefit.host_readback_bytes_saved, benefit.device_traffic_bytes_saved
    effects = [
        (launches, f"{abs(launches)} launch{'es' * (abs(launches) != 1)}"),
        (waits, f"{abs(waits)} host wait{'s' * (abs(waits) != 1)}"),
        (readback, f"{bytes_text(abs(readback))} of readback"),
        (traffic, f"{bytes_text(abs(traffic))} of traffic"),
    ]
    saves = ", ".join(text for saved, text in effects if saved > 0)
    adds = ", ".join(text for saved, text in effects if saved < 0)
    facts = [f"{verb} {what}" for verb, what in (("saves", saves), ("adds", adds)) if what]
    text = "; ".join(facts) or "changes no IO"
    if pinned:
        return f"{text}; pinned by the user"
    if not verdict:
        net = score - compute_ps_added
        lack = "loses time" if net < 0 else f"gains less than {gate.min_gain_ns:g} ns"
        return f"{text}; {lack} ({time_text(net)})"
    return text
