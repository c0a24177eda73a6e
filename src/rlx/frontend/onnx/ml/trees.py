"""Ensembles of trees (ai.onnx.ml): of version 5, and as scikit-learn, LightGBM and XGBoost export them."""

from __future__ import annotations

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.ml.features import ML
from rlx.frontend.onnx.ml.linear import labelled
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.dtype import F32
from rlx.ir.graph import Node
from rlx.records import dataclass

DEEPEST = 8  # levels of trees that are filled up to one depth
MOST_NODES = 4  # times as many leaves as there were nodes
LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(7)
COMPARE = {
    LEQ: ops.less_equal,
    LT: ops.less,
    GTE: ops.greater_equal,
    GT: ops.greater,
    EQ: ops.equal,
    NEQ: ops.not_equal,
}
MODES = {
    "BRANCH_LEQ": LEQ,
    "BRANCH_LT": LT,
    "BRANCH_GTE": GTE,
    "BRANCH_GT": GT,
    "BRANCH_EQ": EQ,
    "BRANCH_NEQ": NEQ,
    "LEAF": LEQ,  # a leaf leads to itself, whatever is compared
}


@dataclass
class Forest:
    """Nodes of all trees in one numbering; a leaf leads to itself."""

    features: np.ndarray
    modes: np.ndarray
    splits: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    leaf: np.ndarray
    tracks: np.ndarray
    """Whether a missing value takes the true branch."""
    roots: np.ndarray
    sets: np.ndarray | None = None

    def take(self, n: Call, x: Node, *tables: np.ndarray) -> list[Node]:
        """[rows, trees, ...]: what tables have for the leaves that rows reach."""
        levels = self.levels() if x.dtype is F32 else None
        if levels is None:
            at = self.leaves_of(n, x)
            return [ops.gather(n.constant(table), at) for table in tables]
        at = self.places_of(n, x, levels[:-1])
        return [ops.gather(*_in_range(n, table[levels[-1].reshape(-1)], at)) for table in tables]

    def levels(self) -> list[np.ndarray] | None:
        """Nodes [trees, 2 ** level] of trees that are filled up to one depth, if that makes few more of them
        and all compare in one way; the last level has leaves only."""
        kinds, depth = set(self.modes[~self.leaf].tolist()), self.depth()
        small = depth <= DEEPEST and len(self.roots) << depth <= MOST_NODES * len(self.leaf)
        if not (depth and small and len(kinds) == 1 and kinds <= COMPARE.keys()) or self.tracks.any():
            return None
        found = [self.roots[:, None]]
        for _ in range(depth):  # a leaf leads to itself
            at = found[-1]
            found.append(np.stack([self.yes[at], self.no[at]], -1).reshape(len(at), -1))
        return found

    def places_of(self, n: Call, x: Node, levels: list[np.ndarray]) -> Node:
        """[rows, trees]: numbers of the leaves that rows reach, tree after tree, in trees of one depth.

        The place of a child follows from that of its node, so a step reads one word, which has the feature
        and the split, and the feature's value. Masks show that both exist: no index is checked.
        """
        (compare,) = (COMPARE[kind] for kind in set(self.modes[~self.leaf].tolist()))
        at = ops.broadcast_to(n.constant(np.arange(len(self.roots))), (x.shape[0], len(self.roots)))
        for nodes in levels:
            bits = self.splits[nodes].astype(np.float32).view(np.int32).astype(np.int64)
            words = ops.gather(*_in_range(n, (bits << 32 | self.features[nodes]).reshape(-1), at))
            split = ops.bitcast(ops.cast(ops.shift_right(words, 32), "i32"), "f32")
            feature = ops.bitwise_and(words, _ones(self.features.max()))
            if isinstance(x.shape[1], int) and _ones(self.features.max()) >= x.shape[1]:
                feature = ops.minimum(feature, x.shape[1] - 1)
            value = ops.gather_elements(x, feature, axis=1)
            at = at * 2 + ops.cast(ops.logical_not(compare(value, split)), "i64")
        return at

    def leaves_of(self, n: Call, x: Node) -> Node:
        """[rows, trees]: the leaves that rows reach. All rows walk down all trees together: a step gathers
        each one's node and compares its feature."""
        start = ops.broadcast_to(n.constant(self.roots), (x.shape[0], len(self.roots)))

        def step(at: Node, _: None) -> tuple[Node, None]:
            value = ops.gather_elements(x, ops.gather(n.constant(self.features), at), axis=1)
            go = self.decisions(n, value, at)
            if self.tracks.any():
                tracks = ops.equal(ops.gather(n.constant(self.tracks), at), 1)
                go = ops.logical_or(go, ops.logical_and(ops.is_nan(value), tracks))
            return ops.where(
                go, ops.gather(n.constant(self.yes), at), ops.gather(n.constant(self.no), at)
            ), None

        return ops.scan(step, start, length=self.depth())[0]

    def depth(self) -> int:
        """Steps until everyone is at a leaf."""
        at, depth = self.roots, 0
        while not self.leaf[at].all():
            inner = at[~self.leaf[at]]
            at, depth = np.unique(np.concatenate([self.yes[inner], self.no[inner]])), depth + 1
            if depth > len(self.leaf):
                raise ModelImportError("its trees have a cycle")
        return depth

    def decisions(self, n: Call, value: Node, at: Node) -> Node:
        """Whether each row takes the true branch of the node it is at."""
        split = ops.gather(n.constant(self.splits.astype(value.dtype.np)), at)
        mode = ops.gather(n.constant(self.modes), at)
        go: Node | None = None
        for kind in sorted(set(self.modes.tolist())):
            if kind == MEMBER:
                members = ops.gather(n.constant(self.sets), at)
                hit = ops.any(ops.equal(ops.expand_dims(value, value.rank), members), axis=value.rank)
            elif kind in COMPARE:
                hit = COMPARE[kind](value, split)
            else:
                raise ModelImportError(f"a node has mode {kind}, which RLX does not know")
            go = hit if go is None else ops.where(ops.equal(mode, kind), hit, go)
        assert go is not None, "there are nodes"
        return go


def _ones(largest: int | np.integer) -> int:
    """The smallest mask that keeps numbers up to `largest`."""
    return (1 << int(largest).bit_length()) - 1


def _in_range(n: Call, table: np.ndarray, at: Node) -> tuple[Node, Node]:
    """A table that is filled up to a power of two, and places in it, masked so that all of them exist."""
    mask = _ones(len(table) - 1)
    rest = [(0, mask + 1 - len(table)), *[(0, 0)] * (table.ndim - 1)]
    return n.constant(np.pad(table, rest)), ops.bitwise_and(at, mask)


@onnx_op("TreeEnsemble", domain=ML, since=5)
def tree_ensemble(n: Call) -> Outputs:
    x = n[0]
    features, modes = (np.array(n.attr(k), np.int64) for k in ("nodes_featureids", "nodes_modes"))
    yes, no, yes_leaf, no_leaf = (
        np.array(n.attr(f"nodes_{k}"), np.int64)
        for k in ("truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    )
    leaves = np.asarray(n.attr("leaf_weights"))
    tracks = np.array(n.attr("nodes_missing_value_tracks_true", [0] * len(features)), np.int64)
    n.attr("nodes_hitrates", None)
    # inner nodes are 0 .., leaves count ..
    count, rest = len(features), (0, len(leaves))
    own = np.arange(count, count + len(leaves))
    modes = np.pad(modes, rest)
    forest = Forest(
        features=np.pad(features, rest),
        modes=modes,
        splits=np.pad(np.asarray(n.attr("nodes_splits")), rest),
        yes=np.concatenate([yes + count * yes_leaf, own]),
        no=np.concatenate([no + count * no_leaf, own]),
        leaf=np.arange(count + len(leaves)) >= count,
        tracks=np.pad(tracks, rest),
        roots=np.array(n.attr("tree_roots"), np.int64),
        sets=membership_sets(modes, n.attr("membership_values", None), x.dtype.np),
    )
    targets = np.array(n.attr("leaf_targetids"), np.int64)
    given = (np.concatenate([np.zeros(count, table.dtype), table]) for table in (leaves, targets))
    weight, target = forest.take(n, x, *given)
    return aggregated(n, weight, target, leaves.dtype)


def membership_sets(modes: np.ndarray, values: np.ndarray, kind: np.dtype) -> np.ndarray | None:
    """[nodes, largest set]: the sets of nodes that test membership, filled up with NaN."""
    if values is None or not (modes == MEMBER).any():
        return None
    flat = np.asarray(values, kind)
    ends = np.flatnonzero(np.isnan(flat))
    parts = [p[~np.isnan(p)] for p in np.split(flat, ends + 1)][: int((modes == MEMBER).sum())]
    out = np.full((len(modes), max(1, max(map(len, parts)))), np.nan, kind)
    for node, part in zip(np.flatnonzero(modes == MEMBER), parts, strict=True):
        out[node, : len(part)] = part
    return out


def aggregated(n: Call, leaf: Node, target: Node, kind: np.dtype) -> Node:
    """Weights of the leaves reached, per target over all trees."""
    how = int(n.attr("aggregate_function", 1))
    many = int(n.attr("n_targets", 1))
    after = int(n.attr("post_transform", 0))
    if after != 0:
        raise ModelImportError(f"post_transform {after} is not supported")
    weight = ops.expand_dims(leaf, 2)
    mine = ops.equal(ops.expand_dims(target, 2), ops.iota((many,)))
    if how in (0, 1):
        total = ops.sum(ops.where(mine, weight, n.constant(0, kind)), axis=1)
        return total / float(leaf.shape[1]) if how == 0 else total
    bound = np.inf if how == 2 else -np.inf
    spread = ops.where(mine, weight, n.constant(bound, kind))
    best = (ops.min if how == 2 else ops.max)(spread, axis=1)
    return ops.where(ops.is_inf(best), n.constant(0, kind), best)


@onnx_op("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(n: Call) -> Outputs:
    how = n.choice("aggregate_function", "SUM", ("SUM", "AVERAGE"))
    n.choice("post_transform", "NONE", ("NONE",))
    trees = len(set(n.attr("nodes_treeids")))
    total = summed(n, "target", int(n.attr("n_targets", 1)))
    base = np.array(n.attr("base_values", [0.0]), np.float32)
    return (total / float(trees) if how == "AVERAGE" else total) + n.constant(base)


@onnx_op("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(n: Call) -> Outputs:
    text = n.attr("classlabels_strings", None)
    labels = n.attr("classlabels_int64s", None)
    many = len(text or labels)
    after = n.choice("post_transform", "NONE", ("NONE", "LOGISTIC", "SOFTMAX"))
    used = set(n.attr("class_ids"))
    single = many == 2 and used == {0}
    scores = summed(n, "class", 1 if single else many)
    scores = scores + n.constant(np.array(n.attr("base_values", [0.0]), np.float32))
    chances = min(n.attr("class_weights")) >= 0
    if many == 2 and len(used) == 1:  # one score decides between two classes
        last = scores if single else ops.slice_axis(scores, 1, 1, 1)
        picked = ops.reshape(ops.greater(last, 0.5 if chances else 0.0), (-1,))
    else:
        picked = ops.argmax(scores, axis=1)
    if single:  # what the first class has follows from it
        other = 1.0 - scores if chances else -scores
        scores = ops.concat([other, scores], 1)
    if after == "LOGISTIC" and not (single and chances):
        scores = ops.sigmoid(scores)
    if after == "SOFTMAX":
        scores = ops.softmax(scores, 1)
    label = labelled(n, ops.cast(picked, "i64"), "classlabels_strings", "classlabels_int64s")
    return label, scores


def summed(n: Call, kind: str, many: int) -> Node:
    """[rows, many]: weights of the leaves that rows reach, summed over trees."""
    trees, own = (n.attr(f"nodes_{k}ids") for k in ("tree", "node"))
    number = {key: i for i, key in enumerate(zip(trees, own, strict=True))}
    names = n.attr("nodes_modes")
    if not set(names) <= MODES.keys():
        raise ModelImportError(
            f"a node has mode {(set(names) - MODES.keys()).pop()!r}, which RLX does not know"
        )
    leaf = np.array([name == "LEAF" for name in names])
    here = np.arange(len(own))
    yes, no = (
        np.where(
            leaf, here, [number.get(key, 0) for key in zip(trees, n.attr(f"nodes_{k}nodeids"), strict=True)]
        )
        for k in ("true", "false")
    )
    n.attr("nodes_hitrates", None)
    inner = {*yes[~leaf].tolist(), *no[~leaf].tolist()}
    forest = Forest(
        features=np.array(n.attr("nodes_featureids"), np.int64),
        modes=np.array([MODES[name] for name in names], np.int64),
        splits=np.array(n.attr("nodes_values"), np.float32),
        yes=yes,
        no=no,
        leaf=leaf,
        tracks=np.array(n.attr("nodes_missing_value_tracks_true", [0] * len(own)), np.int64),
        roots=np.array([i for i in here.tolist() if i not in inner], np.int64),
    )
    weights = np.zeros((len(own), many), np.float32)
    places = zip(n.attr(f"{kind}_treeids"), n.attr(f"{kind}_nodeids"), strict=True)
    for key, target, weight in zip(places, n.attr(f"{kind}_ids"), n.attr(f"{kind}_weights"), strict=True):
        weights[number[key], target if many > 1 else 0] += weight
    (reached,) = forest.take(n, ops.cast(n[0], "f32"), weights)
    return ops.sum(reached, axis=1)
