"""Rotary positions: their frequencies as GGUF files and config.json state them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlx.errors import FormatError, UnsupportedError
from rlx.files import Json
from rlx.llm.gguf import GgufFile
from rlx.records import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary positions: pairs of the first `features` of a head turn by position * frequency."""

    base: float
    features: int
    interleaved: bool = False
    factors: tuple[float, ...] = ()
    """What each frequency is divided by."""
    magnitude: float = 1.0

    def frequencies(self) -> np.ndarray:
        """One for each pair, in f64.

        >>> Rope(100.0, 4, factors=(1.0, 2.0)).frequencies().tolist()
        [1.0, 0.05]
        """
        plain: np.ndarray = self.base ** (np.arange(0, self.features, 2) / -self.features)
        return plain / np.array(self.factors) if self.factors else plain


# -- GGUF


def gguf_rope(file: GgufFile, kind: str, depth: int) -> Rope:
    features = file.get(f"{kind}.rope.dimension_count", int, depth)
    scaling = file.get(f"{kind}.rope.scaling.type", str, "none")
    base = file.get(f"{kind}.rope.freq_base", float, 10000.0)
    factors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        factors = tuple(file.tensors["rope_freqs.weight"].array().astype(float).ravel().tolist())
    elif "rope_factors_short.weight" in file.tensors:  # see _gguf_short
        factors = tuple(file.tensors["rope_factors_short.weight"].array().astype(float).ravel().tolist())
    elif scaling == "linear":
        factors = (file.get(f"{kind}.rope.scaling.factor", float),) * (features // 2)
    elif scaling == "yarn":
        return _gguf_yarn(file, kind, Rope(base, features, kind == "llama"))
    elif scaling not in ("none", "longrope"):
        raise UnsupportedError(f"{file.path}: rotary positions scaled by {scaling!r} are not supported")
    return Rope(
        base=base,
        features=features,
        interleaved=kind == "llama",
        factors=factors,
        magnitude=file.get(f"{kind}.rope.scaling.attn_factor", float, 1.0),
    )


def _gguf_yarn(file: GgufFile, kind: str, plain: Rope) -> Rope:
    def real(key: str, default: float | None = None) -> float:
        return file.get(f"{kind}.rope.scaling.{key}", float, default)

    factor = real("factor")
    betas = real("yarn_beta_fast", 32.0), real("yarn_beta_slow", 1.0)
    usual = _yarn_magnitude(factor)
    return replace(
        plain,
        factors=_yarn_factors(
            file.path, plain, factor, real("original_context_length"), *betas, kind != "gpt-oss"
        ),
        magnitude=usual * real("yarn_attn_factor", real("attn_factor", 1.0)),
    )


# -- config.json

_BASES = {"gpt_oss": 150000.0}  # of rotary positions, where a config has none


def hf_values(given: Json, layer_type: str) -> Json:
    """The values for rotary positions, which newer files keep in one place, perhaps by type of layer."""
    found = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(found, dict):
        return {}
    own = found.get(layer_type)
    return own if isinstance(own, dict) else {} if "sliding_attention" in found else found


def real_of(key: str, places: Sequence[Json], default: float) -> float:
    """A number from the first place that has it."""
    found = [place[key] for place in places if place.get(key) is not None]
    return float(found[0]) if found else default


def hf_rope(path: str, given: Json, depth: int) -> Rope:
    values = hf_values(given, "full_attention")
    base = real_of("rope_theta", (values, given), _BASES.get(str(given.get("model_type")), 10000.0))
    features = int(depth * real_of("partial_rotary_factor", (values, given), 1.0))
    plain = Rope(base, features)
    scaling = values.get("rope_type", values.get("type", "default"))
    if scaling == "default":
        return plain
    if scaling == "linear":
        return Rope(base, features, factors=(float(values["factor"]),) * (features // 2))
    if scaling == "llama3":
        return Rope(base, features, factors=_llama3_factors(plain, values))
    if scaling == "yarn":
        return _hf_yarn(path, plain, values, float(given["max_position_embeddings"]))
    if scaling == "longrope":
        before = float(given.get("original_max_position_embeddings") or given["max_position_embeddings"])
        longer = float(given["max_position_embeddings"]) / before
        usual = math.sqrt(1 + math.log(longer) / math.log(before)) if longer > 1 else 1.0
        return Rope(
            base,
            features,
            factors=tuple(map(float, values["short_factor"])),
            magnitude=float(values.get("attention_factor", usual)),
        )
    raise UnsupportedError(f"{path}: rotary positions scaled by {scaling!r} are not supported")


def _hf_yarn(path: str, plain: Rope, values: Json, context: float) -> Rope:
    before = real_of("original_max_position_embeddings", (values,), context)
    factor = real_of("factor", (values,), context / before)
    betas = real_of("beta_fast", (values,), 32.0), real_of("beta_slow", (values,), 1.0)
    usual = _yarn_magnitude(factor)
    if values.get("mscale") and values.get("mscale_all_dim"):
        usual = _yarn_magnitude(factor, float(values["mscale"])) / _yarn_magnitude(
            factor, float(values["mscale_all_dim"])
        )
    return replace(
        plain,
        factors=_yarn_factors(path, plain, factor, before, *betas, values.get("truncate", True) is not False),
        magnitude=real_of("attention_factor", (values,), usual),
    )


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn_factors(
    path: str, plain: Rope, factor: float, before: float, fast: float, slow: float, whole: bool
) -> tuple[float, ...]:
    """Pairs that turn more than `fast` times in the context of `before` stay, those under `slow` times are
    divided by `factor`, between them it is blended; with `whole` the limits are rounded to whole pairs.
    """
    if not (plain.base > 1 and min(factor, before, fast, slow) > 0 and plain.features > 1):
        raise FormatError(
            f"{path}: rotary positions scaled by yarn have the factor {factor} for a context of {before}, "
            f"turns {fast} and {slow}, the base {plain.base}"
        )
    low, high = (
        plain.features * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(plain.base))
        for turns in (fast, slow)
    )
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, plain.features - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - np.clip((np.arange(plain.features // 2) - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - kept) / factor + kept)).tolist())


def _llama3_factors(plain: Rope, values: Json) -> tuple[float, ...]:
    """Slow frequencies are divided by `factor`, fast ones stay, those between are blended."""
    factor, low, high, before = (
        float(values[name])
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = before * plain.frequencies() / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - blend) / factor + blend)).tolist())
