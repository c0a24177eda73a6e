"""`python -m rlx.fuzz`: random programs, or mutated files; exit code 1 if anything is found."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rlx.errors import RlxError
from rlx.fuzz import files, worker
from rlx.fuzz.hosts import named
from rlx.fuzz.oracles import MAIN_WAYS, MORE_WAYS
from rlx.fuzz.report import Tally, write_tally
from rlx.fuzz.worker import Hunt

MANY = 1 << 40  # programs, when only seconds limit a run
ROUND = 200  # programs of one host before it is the next one's turn


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m rlx.fuzz", description=__doc__)
    top.add_argument("what", nargs="?", default="programs", choices=["programs", "files"])
    top.add_argument("--seconds", type=float, help="stop after this many seconds")
    top.add_argument("--programs", type=int, help="programs per host, or mutants of `files`")
    top.add_argument("--seed", type=int, default=0, help="seed of the random programs")
    top.add_argument("--start", type=int, default=0, help="number of the first program")
    top.add_argument("--host", default="host", help="a target that this machine runs, or all")
    top.add_argument("--poison", action="store_true", help="overwrite freed memory in every program")
    top.add_argument("--way", choices=list(MAIN_WAYS + MORE_WAYS), help="run only this check")
    top.add_argument("--tally", type=Path, help="append a line of JSON about each host to this file")
    top.add_argument("--findings", type=Path, help="write each reproducer to a file in this folder")
    return top


class Log:
    """Findings of a run, printed once per signature; progress on stderr."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.texts, self.all = folder, dict[str, str](), 0

    def found(self, host: str, number: int, signature: object, text: str) -> None:
        self.all += 1
        key = str(signature)
        if key in self.texts and len(self.texts[key]) <= len(text):
            return
        self.texts[key] = text
        print(f"# program {number} as {host}\n{text}", flush=True)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{len(self.texts):03}-{number}-{host}.py").write_text(text, encoding="utf-8")


def programs(options: argparse.Namespace, log: Log) -> None:
    hosts = named(options.host)
    begin = time.monotonic()
    stop = options.start + (options.programs or MANY)
    at = dict.fromkeys(hosts, options.start)
    found, spent = dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0.0)

    def is_over() -> bool:
        return options.seconds is not None and time.monotonic() - begin >= options.seconds

    while not is_over() and any(n < stop for n in at.values()):
        for host in hosts:
            turn = time.monotonic()
            end = min(stop, at[host] + ROUND)
            if options.what == "files":
                saying = files.run(options.seed, at[host], end, host)
            else:
                hunt = Hunt(options.seed, host, options.poison, options.way)
                saying = worker.run(hunt, at[host], end)
            for said in saying:
                if "done" in said:
                    at[host] = said["done"]
                    count = at[host] - options.start
                    print(
                        f"\r{host}: {count} {options.what}, {found[host]} findings", end="", file=sys.stderr
                    )
                    if is_over():
                        break
                else:
                    found[host] += 1
                    log.found(host, said["found"], said["signature"], said["text"])
            spent[host] += time.monotonic() - turn
    print(file=sys.stderr)
    for host in hosts:
        count = at[host] - options.start
        tally = Tally(
            options.seed, count, host, found[host], round(spent[host], 1), options.poison, options.what
        )
        print(f"{host}: {count} {options.what} in {tally.seconds} s, {found[host]} findings", file=sys.stderr)
        if options.tally is not None:
            write_tally(options.tally, tally)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["work"]:
        seed, start, stop = (int(n) for n in arguments[1:4])
        worker.work(Hunt(seed, poison="--poison" in arguments, way=arguments[4] or None), start, stop)
        return 0
    if arguments[:1] == ["work-files"]:
        seed, start, stop = (int(n) for n in arguments[1:4])
        files.work(seed, start, stop)
        return 0
    if arguments[:1] == ["check-one"]:
        worker.check_one()
        return 0
    options = parser().parse_args(arguments)
    if options.seconds is None and options.programs is None:
        options.seconds = 60.0
    log = Log(options.findings)
    try:
        programs(options, log)
    except RlxError as e:
        print(e, file=sys.stderr)
        return 2
    return 1 if log.all else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
