"""Inputs from the command line: `name=file.npy`, images, sounds, or generated values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from rlx.cost.io import assumed_binding
from rlx.errors import FormatError, GuardError, InputError
from rlx.files import file_boundary, read_npy, read_plain
from rlx.ir.dim import Expr, evaluate, symbols
from rlx.ir.dtype import convert
from rlx.ir.types import TensorType
from rlx.zoo.media import read_png, read_wav

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

GENERATED = ("random", "zeros", "ones")


def sizes_of(texts: Iterable[str], option: str = "--bind") -> dict[str, int]:
    """`seq=128` texts as a dict.

    >>> sizes_of(["seq=128", "batch=1"])
    {'seq': 128, 'batch': 1}
    """
    out = {}
    for text in texts:
        name, equals, size = text.partition("=")
        if not (equals and name and size.isdecimal()):
            raise click.UsageError(f"{option} takes NAME=SIZE, like seq=128, not {text!r}")
        out[name] = int(size)
    return out


def check_symbols(sizes: Mapping[str, int], known: Sequence[str]) -> None:
    """Refuse sizes of symbols that a model does not have.

    >>> check_symbols({"sec": 128}, ["batch", "seq"])
    Traceback (most recent call last):
    rlx.errors.InputError: the model has no symbol 'sec' to bind; it has: batch, seq
    """
    unknown = next((name for name in sizes if name not in known), None)
    if unknown is not None:
        has = f"it has: {', '.join(known)}" if known else "all its sizes are fixed"
        raise InputError(f"the model has no symbol {unknown!r} to bind; {has}")


def workable_sizes(program: CompiledProgram, fixed: Mapping[str, int]) -> Mapping[str, int]:
    """A size for every symbol: the fixed ones; for the others those that the program was planned for, or,
    if these break an assumption of the program, others that do not."""
    planner = program.lir.planner
    planned = {**planner.binding, **fixed}
    try:
        planner.check_guards(planned)
    except GuardError:
        return assumed_binding(program.lir.mir, fixed)
    return planned


def named(texts: Iterable[str]) -> dict[str, str]:
    """`name=what` texts of --input as a dict."""
    out = {}
    for text in texts:
        name, equals, what = text.partition("=")
        if not (equals and name and what):
            raise click.UsageError(f"--input takes NAME=FILE or NAME=random, not {text!r}")
        out[name] = what
    return out


def make_inputs(
    wanted: Mapping[str, TensorType],
    given: Mapping[str, str],
    sizes: Mapping[str, int],
    complete: Callable[[Mapping[str, int]], Mapping[str, int]],
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """An array for every input: from what was given, else random.

    `sizes` are those the user has fixed; files decide other symbols, and `complete` adds the rest.
    """
    unknown = next((name for name in given if name not in wanted), None)
    if unknown is not None:
        raise InputError(f"the model has no input {unknown!r}; it has: {', '.join(wanted) or 'none'}")
    binding = dict(sizes)
    out: dict[str, np.ndarray] = {}
    for name, what in given.items():
        if what not in GENERATED:
            out[name] = from_file(Path(what), wanted[name], binding)
            _bind(name, wanted[name], out[name].shape, binding)
    binding = dict(complete(binding))
    for number, (name, of) in enumerate(wanted.items()):
        if name not in out:
            rng = np.random.default_rng((seed, number))
            out[name] = generated(of, of.bind(binding), given.get(name, "random"), rng)
    return {name: out[name] for name in wanted}


def _bind(name: str, of: TensorType, shape: tuple[int, ...], binding: dict[str, int]) -> None:
    """Note the sizes that a file gives to symbols; other contradictions are found when the program is run."""
    for d, n in zip(of.shape, shape, strict=False):
        if isinstance(d, Expr) and str(d) in symbols(d):
            known = binding.setdefault(str(d), n)
            if known != n:
                raise InputError(f"input {name!r} says {d} = {n}, but {d} is {known}; give equal sizes")


def generated(of: TensorType, shape: tuple[int, ...], what: str, rng: np.random.Generator) -> np.ndarray:
    """Zeros, ones, or random values: normal for floats, small counts for integers, coins for bools."""
    if what != "random":
        return np.full(shape, 0 if what == "zeros" else 1).astype(of.dtype.np)
    if of.dtype.is_float or of.dtype.is_complex:
        return convert(rng.standard_normal(shape).astype(np.float32), of.dtype)
    return convert(rng.integers(0, 2, shape), of.dtype)


def from_file(path: Path, of: TensorType, sizes: Mapping[str, int]) -> np.ndarray:
    """The array in a file, laid out for an input: .npy as it is, images and sounds by the input's shape."""
    match path.suffix.lower():
        case ".npy":
            array = _from_npy(path)
            plain = array.dtype.kind == "V" and array.itemsize == of.dtype.np.itemsize
            return array.view(of.dtype.np) if plain else array  # NumPy forgets the names of bf16 and the like
        case ".png":
            return image_tensor(read_png(path), of, sizes, path.name)
        case ".wav":
            return _sound_tensor(read_wav(path), of, sizes, path.name)
    raise InputError(
        f"cannot use {str(path)!r} as an input; give a .npy, .png or .wav file, or {', '.join(GENERATED)}"
    )


def _from_npy(path: Path) -> np.ndarray:
    with file_boundary(path, "array of numbers, as np.save writes it"):
        array = read_npy(read_plain(path))
    if array.dtype.kind not in "biufcV" or array.dtype.names is not None:
        raise FormatError(f"{path} holds elements of type {array.dtype}; save an array of numbers")
    return np.asarray(array)


def _size(d: Any, sizes: Mapping[str, int]) -> int | None:
    """A size that is known before the file is looked at."""
    if isinstance(d, int):
        return d
    return evaluate(d, sizes) if all(s in sizes for s in symbols(d)) else None


def image_tensor(pixels: np.ndarray, of: TensorType, sizes: Mapping[str, int], name: str) -> np.ndarray:
    """Pixels as NCHW or NHWC, by the axis that has 1 or 3 channels; floats are in 0..1.

    Where the input or the user fixes height or width, the image is resized.

    >>> from rlx.ir.types import parse_type
    >>> image_tensor(np.full((2, 2, 1), 255, np.uint8), parse_type("f32[1,3,h,w]"), {"h": 4}, "x").shape
    (1, 3, 4, 2)
    """
    shape = of.shape[1:] if len(of.shape) == 4 else of.shape
    channel = next((axis for axis in (0, 2) if len(shape) == 3 and shape[axis] in (1, 3)), None)
    if channel is None:
        raise InputError(f"image {name} does not fit an input of {of}; it should be [n,3,h,w] or [n,h,w,3]")
    height, width = shape[1:] if channel == 0 else shape[:2]
    h, w = _size(height, sizes), _size(width, sizes)
    pixels = _resized(pixels, h or len(pixels), w or pixels.shape[1])
    if shape[channel] == 1 and pixels.shape[2] == 3:
        pixels = np.rint(pixels @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[:, :, None]
    pixels = np.broadcast_to(pixels, (*pixels.shape[:2], int(shape[channel])))
    values = pixels / np.float32(255) if of.dtype.is_float else pixels
    if channel == 0:
        values = values.transpose(2, 0, 1)
    return convert(np.ascontiguousarray(values), of.dtype).reshape((1,) * (len(of.shape) - 3) + values.shape)


def _resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear, pixel centres aligned."""
    if pixels.shape[:2] == (height, width):
        return pixels

    def taps(size: int, to: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.clip((np.arange(to) + 0.5) * size / to - 0.5, 0, size - 1)
        low = np.floor(at).astype(np.int64)
        return low, np.minimum(low + 1, size - 1), at - low

    top, bottom, down = taps(len(pixels), height)
    left, right, across = taps(pixels.shape[1], width)
    rows = pixels[top] * (1 - down)[:, None, None] + pixels[bottom] * down[:, None, None]
    mixed = rows[:, left] * (1 - across)[:, None] + rows[:, right] * across[:, None]
    return np.rint(mixed).astype(np.uint8)


def _sound_tensor(samples: np.ndarray, of: TensorType, sizes: Mapping[str, int], name: str) -> np.ndarray:
    """Samples along the last axis; cut or filled with silence where its size is fixed."""
    leading = [_size(d, sizes) for d in of.shape[:-1]]
    if not of.shape or any(n not in (None, 1) for n in leading):
        raise InputError(f"sound {name} does not fit an input of {of}; it should be [samples] or [1,samples]")
    length = _size(of.shape[-1], sizes) or len(samples)
    fitted = np.zeros(length, np.float32)
    fitted[: len(samples)] = samples[:length]
    values = fitted if of.dtype.is_float else fitted * 32767
    return convert(values, of.dtype).reshape((1,) * len(leading) + (length,))
