"""The texts of an export to C: header, example, CMake file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlx.config import VERSION, bytes_text
from rlx.export.errors import TEXTS, Code
from rlx.export.prepared import Prepared
from rlx.export.tables import Argument, Tables

_C_TYPES = {
    "f64": "double",
    "f32": "float",
    "i64": "int64_t",
    "i32": "int32_t",
    "i16": "int16_t",
    "i8": "int8_t",
    "u64": "uint64_t",
    "u32": "uint32_t",
    "u16": "uint16_t",
    "u8": "uint8_t",
    "bool": "uint8_t",
    "f16": "uint16_t",
    "bf16": "uint16_t",
    "c64": "float",
    "c128": "double",
}
_NOTES = {
    "bool": "0 or 1",
    "f16": "the bits of an IEEE half",
    "bf16": "the upper half of a float's bits",
    "c64": "pairs of real and imaginary part",
    "c128": "pairs of real and imaginary part",
}


def constant(prefix: str, *words: str) -> str:
    """The name of a constant.

    >>> constant("net", "input", "last hidden.state")
    'NET_INPUT_LAST_HIDDEN_STATE'
    """
    return "_".join(re.sub(r"\W+", "_", w, flags=re.A).strip("_").upper() for w in (prefix, *words))


def c_type(entry: Argument) -> str:
    """The type of the elements of an input or output in C."""
    return _C_TYPES.get(entry.dtype.name, "uint8_t")


def _unique(names: Sequence[str]) -> list[str]:
    """Names of constants, told apart by numbers where they are equal."""
    out: list[str] = []
    for name in names:
        out.append(name if name not in out else f"{name}_{len(out)}")
    return out


def _comment(text: str) -> str:
    """Text that cannot end a comment."""
    return text.replace("*/", "* /").replace("\n", " ")


def _entries(name: str, kind: str, entries: Sequence[Argument]) -> list[str]:
    lines = []
    for number, (entry, constant_name) in enumerate(
        zip(entries, _unique([constant(name, kind, e.name) for e in entries]), strict=True)
    ):
        shape = "".join(f"[{d}]" for d in entry.shape)
        note = _NOTES.get(entry.dtype.name, "" if entry.dtype.name in _C_TYPES else "one byte each")
        told = f"{c_type(entry)} {entry.name}{shape}" + (f" ({entry.dtype.name}: {note})" if note else "")
        lines.append(f"  {constant_name} = {number}, /* {_comment(told)}, {entry.nbytes} bytes at most */")
    return lines


def header(program: Prepared, embedded: bool) -> str:
    """The header of a program."""
    tables, name, upper = program.tables, program.name, constant(program.name)
    inputs, outputs = _entries(name, "input", tables.inputs), _entries(name, "output", tables.outputs)
    symbols = _unique([constant(name, "size", s.name) for s in tables.symbols])
    sizes = [
        f"  {c} = {i}, /* {_comment(s.name)}: {s.low} to {s.high} */"
        for i, (c, s) in enumerate(zip(symbols, tables.symbols, strict=True))
    ]
    codes = [
        f"  {constant(name, *([] if code is Code.OK else ['error']), code.name)} = {int(code)}, "
        f"/* {_comment(TEXTS[code])} */"
        for code in Code
    ]
    ranks = ", ".join(f"{e.name} {len(e.shape)}" for e in (*tables.inputs, *tables.outputs))
    weights = (
        f"`weights` is the path of {name}.weights, which is mapped, or NULL for the weights in the library."
        if embedded
        else f"`weights` is the path of {name}.weights, which is mapped."
    )
    bind = (
        f"""/* Set the sizes of the next runs, in the order of {
            upper
        }_SIZE_*. It must be called before the first
 * run. Sizes out of range, or which the program does not allow, give an error code and change nothing.{
            '''
 * A change of a size that a state has resets all states.'''
            if tables.states
            else ""
        } */"""
        if tables.symbols
        else """/* All sizes of this program are fixed: it need not be called. `sizes` may be NULL. */"""
    )
    enums = [("size", sizes), ("input", inputs), ("output", outputs)]
    blocks = "\n\n".join(
        f"enum {name}_{what} {{\n{chr(10).join(lines)}\n}};" for what, lines in enums if lines
    )
    states = "".join(f"\n *   {_comment(s.name)}: {bytes_text(s.nbytes)}" for s in tables.states)
    kept = f" States keep their values from run to run:{states}" if states else ""
    return f"""/* {_comment(tables.name)}, compiled for {tables.target} by RLX {VERSION}.
 *
 * A model serves one caller at a time. Several models, of this kind or others, are independent.
 * Only {name}_open and {name}_close allocate and release memory: {bytes_text(program.memory)} and
 * the weights.
 */
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_VERSION UINT64_C({program.version:#018x})

typedef struct {name} {name};

{blocks}

/* What functions return; codes from {len(Code)} on are about sizes. {name}_error has a text for each. */
enum {name}_code {{
{chr(10).join(codes)}
}};

/* Open a model whose runs take `threads` threads, the caller's among them. {weights}
 * On failure *model is NULL, and the error code is returned. */
int {name}_open({name} **model, const char *weights, int threads);

{bind}
int {name}_bind({name} *model, const int64_t *sizes);

/* Memory of an input, to be filled before a run, and of an output, to be read after it. It stays the same
 * while the model is open, and has room for the largest sizes. Elements are dense, the last axis is
 * contiguous. NULL, if there is no such number. */
void *{name}_input({name} *model, int input);
const void *{name}_output({name} *model, int output);

/* Shapes at the sizes that are bound. Ranks: {_comment(ranks)}. */
const int64_t *{name}_input_shape({name} *model, int input);
const int64_t *{name}_output_shape({name} *model, int output);

/* Compute the outputs of the inputs.{kept} */
int {name}_run({name} *model);

/* Begin anew: states get their first values, and inputs that are read once are read again. */
void {name}_reset({name} *model);

/* The text of an error code. */
const char *{name}_error(int code);

/* {upper}_VERSION of the library, to be compared with that of the header. */
uint64_t {name}_version(void);

/* Release everything. NULL is allowed. */
void {name}_close({name} *model);

/* For systems without files: bytes that a model needs for so many threads, and a model in memory that is all
 * zeros and begins at a page. `weights` are the bytes of {name}.weights, at a page, too. Such a model is not
 * closed. */
int64_t {name}_bytes(int threads);
int {name}_init({name} *model, const void *weights, int64_t nbytes);

#ifdef __cplusplus
}}
#endif
#endif
"""


_READER = """static void read_input(int argc, char **argv, int number, void *input, size_t bytes) {
    FILE *file = number < argc ? fopen(argv[number], "rb") : NULL;
    if (file == NULL) return;
    if (fread(input, 1, bytes, file) != bytes) fprintf(stderr, "%s is too short\\n", argv[number]);
    fclose(file);
}

"""


def example(tables: Tables, name: str) -> str:
    """A program that runs the model once on zeros, or on files with the bytes of its inputs."""
    sizes = ", ".join(f"{s.high} /* {_comment(s.name)} */" for s in tables.symbols)
    bind = (
        f"""    const int64_t sizes[] = {{{sizes}}};
    if ((code = {name}_bind(model, sizes)) != 0) return fail(model, code);
"""
        if sizes
        else ""
    )
    reads = [
        f"    read_input(argc, argv, {i + 2}, {name}_input(model, {i}), "
        f"{e.dtype.itemsize} * elements({name}_input_shape(model, {i}), {len(e.shape)}));"
        for i, e in enumerate(tables.inputs)
    ]
    writes = [
        f"    fwrite({name}_output(model, {i}), {e.dtype.itemsize}, "
        f"elements({name}_output_shape(model, {i}), {len(e.shape)}), stdout);"
        for i, e in enumerate(tables.outputs)
    ]
    reader = _READER if tables.inputs else ""
    return f"""/* Runs {name} once. Inputs are files with the bytes of their elements, in order, or zeros. The
 * bytes of all outputs go to the standard output: {name}_main {name}.weights [INPUT]... > outputs */
#include <stdio.h>
#include "{name}.h"

static int fail({name} *model, int code) {{
    fprintf(stderr, "{name}: error %d: %s\\n", code, {name}_error(code));
    {name}_close(model);
    return 1;
}}

static size_t elements(const int64_t *shape, int rank) {{
    size_t count = 1;
    for (int axis = 0; axis < rank; axis++) count *= (size_t)shape[axis];
    return count;
}}

{reader}int main(int argc, char **argv) {{
    if ({name}_version() != {constant(name)}_VERSION) {{
        fprintf(stderr, "{name}.h belongs to another version of the library\\n");
        return 1;
    }}
    {name} *model;
    int code = {name}_open(&model, argc > 1 ? argv[1] : "{name}.weights", 1);
    if (code != 0) return fail(model, code);
{bind}{chr(10).join(reads)}
    if ((code = {name}_run(model)) != 0) return fail(model, code);
{chr(10).join(writes)}
    {name}_close(model);
    return 0;
}}
"""


def cmake(name: str) -> str:
    """A CMake file that other projects add as a folder, and that builds the example."""
    return f"""cmake_minimum_required(VERSION 3.13)
project({name} C)

add_library({name} STATIC IMPORTED GLOBAL)
set_target_properties({name} PROPERTIES
  IMPORTED_LOCATION "${{CMAKE_CURRENT_SOURCE_DIR}}/lib{name}.a"
  INTERFACE_INCLUDE_DIRECTORIES "${{CMAKE_CURRENT_SOURCE_DIR}}")
find_package(Threads REQUIRED)
target_link_libraries({name} INTERFACE Threads::Threads)

add_executable({name}_main main.c)
target_link_libraries({name}_main {name})
"""
