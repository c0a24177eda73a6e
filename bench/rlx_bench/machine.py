"""Which kind of machine figures are of: they are kept, published and compared by kind.

A kind is the CPU's design and the target that RLX sees, such as zen4-x86-64-v4-bf16-vnni. With RLX_HOST, a
machine with AVX-512 stands for one without: peers that can be are then limited to AVX2, too.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

from rlx.target.cpu import host, machine_features
from rlx_bench.engines import ENGINES

# Vendor, family, models -> design. Names of CPUs say less: virtual machines call them all "AMD EPYC".
DESIGNS: tuple[tuple[str, int, range, str], ...] = (
    ("AuthenticAMD", 23, range(0x30), "zen1"),
    ("AuthenticAMD", 23, range(0x30, 0x100), "zen2"),
    ("AuthenticAMD", 25, range(0x10), "zen3"),
    ("AuthenticAMD", 25, range(0x10, 0x20), "zen4"),
    ("AuthenticAMD", 25, range(0x20, 0x60), "zen3"),
    ("AuthenticAMD", 25, range(0x60, 0x100), "zen4"),
    ("AuthenticAMD", 26, range(0x100), "zen5"),
    ("GenuineIntel", 6, range(85, 86), "skylake-server"),
    ("GenuineIntel", 6, range(106, 107), "ice-lake-server"),
    ("GenuineIntel", 6, range(143, 144), "sapphire-rapids"),
    ("GenuineIntel", 6, range(151, 155), "alder-lake"),
    ("GenuineIntel", 6, range(173, 174), "granite-rapids"),
    ("GenuineIntel", 6, range(207, 208), "emerald-rapids"),
)


def design_of(cpuinfo: str) -> str:
    """The design of a CPU, from the text of /proc/cpuinfo; a CPU without a name here gets its numbers.

    >>> design_of("vendor_id : AuthenticAMD\\ncpu family : 25\\nmodel : 1\\nmodel name : AMD EPYC")
    'zen3'
    >>> design_of("vendor_id : GenuineIntel\\ncpu family : 6\\nmodel : 999")
    'genuineintel-6-999'
    """
    facts = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", cpuinfo, re.M)[::-1])  # the first core is what counts
    if not {"vendor_id", "cpu family", "model"} <= facts.keys():
        return re.sub(r"\W+", "-", (platform.processor() or platform.machine()).lower())
    vendor, family, model = facts["vendor_id"], int(facts["cpu family"]), int(facts["model"])
    for maker, number, models, name in DESIGNS:
        if (maker, number) == (vendor, family) and model in models:
            return name
    return f"{vendor.lower()}-{family}-{model}"


def kind() -> str:
    """The kind of this machine, as RLX sees it.

    >>> kind().endswith(host().name)
    True
    """
    return f"{design_of(_cpuinfo())}-{host().name}"


def limited() -> bool:
    """Whether this machine has AVX-512 and stands for one with AVX2 only."""
    return "avx512f" in machine_features() and host().has("avx2") and not host().has_avx512


def limits(engine: str) -> Mapping[str, str]:
    """Environment variables that keep an engine to what RLX may use here."""
    return ENGINES[engine].to_avx2 or {} if limited() else {}


def beyond_limit(engine: str) -> bool:
    """Whether an engine uses more of this machine than RLX may, and no variable stops it."""
    return limited() and ENGINES[engine].to_avx2 is None


def processor() -> str:
    """Cores and name of the CPU."""
    names = re.findall(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.M)
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
