"""Fuzzes the C++ decoders under AddressSanitizer and UndefinedBehaviorSanitizer: ``make fuzz``.

Any bytes may come out of a network. For each decoder: the corpus beside this file, then mutations of it
for ``--seconds``. clang's libFuzzer where it is there, which follows coverage; else the plain driver
mutate.cpp with any g++. Prints executions and findings; a finding's input is kept, and its path printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

HERE = pathlib.Path(__file__).parent
CPU = HERE.parent.parent / "csrc" / "cpu"
TARGETS = ("decode_mean", "reduce_encode", "topk_mask")
FLAGS = [
    *("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-Wno-psabi", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]
#: Of CMakeLists.txt: instruction sets besides the baseline, and what /proc/cpuinfo must say for them.
WIDE = {
    "avx512": ("-march=x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx2": ("-march=x86-64-v3", {"avx2", "fma", "bmi2"}),
}


def compiler(engine: str) -> list[str] | None:
    """The compiler and its flags for ``libfuzzer`` or ``mutate``; None where there is none."""
    if engine == "mutate":
        gxx = shutil.which("g++")
        return [gxx, *FLAGS] if gxx else None
    names = ["clang++", *sorted(pathlib.Path(p).name for p in glob.glob("/usr/bin/clang++-*"))]
    for name in filter(shutil.which, names):
        probe = [name, "-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", os.devnull]
        source = b'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
        if subprocess.run(probe, input=source, capture_output=True).returncode == 0:
            return [name, *FLAGS, "-fsanitize=fuzzer-no-link"]
    return None


def widest() -> str | None:
    """The instruction set whose loops this processor runs, besides the baseline's."""
    try:
        flags = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return None
    return next((isa for isa, (_, needed) in WIDE.items() if needed <= flags), None)


def build(
    engine: str, folder: pathlib.Path, wide: str | None, targets: Sequence[str]
) -> dict[str, pathlib.Path]:
    """The fuzzers, by target: of the baseline's loops, and of those of ``wide``."""
    base = compiler(engine)
    if base is None:
        raise RuntimeError(f"no compiler for the engine {engine!r}")
    jobs: dict[pathlib.Path, list[str]] = {}
    jobs[folder / "baseline.o"] = ["-DGC_ISA=baseline", str(CPU / "loops.cpp")]
    if wide is not None:
        base.append(f"-DWIDE={wide}")
        jobs[folder / f"{wide}.o"] = [WIDE[wide][0], f"-DGC_ISA={wide}", str(CPU / "loops.cpp")]
    shared = ["select", "partition"]
    for name in shared:
        jobs[folder / f"{name}.o"] = [str(CPU / f"{name}.cpp")]
    if engine == "mutate":
        jobs[folder / "mutate.o"] = [str(HERE / "mutate.cpp")]
    common = list(jobs)
    for target in targets:
        jobs[folder / f"{target}.o"] = [f"-DTARGET={target}", str(HERE / "target.cpp")]

    def compile(output: pathlib.Path) -> None:
        subprocess.run([*base, *jobs[output], "-c", "-o", str(output)], check=True)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(compile, jobs))
    link = ["-fsanitize=fuzzer"] if engine == "libfuzzer" else []
    built = {}
    for target in targets:
        objects = [str(o) for o in (*common, folder / f"{target}.o")]
        subprocess.run([*base, *link, *objects, "-o", str(folder / target)], check=True)
        built[target] = folder / target
    return built


def fuzz(binary: pathlib.Path, seconds: float, corpus: list[pathlib.Path]) -> tuple[int, str]:
    """Executions, and what a sanitizer said ("" if nothing). Findings are kept beside the binary."""
    command = [str(binary), *map(str, corpus), f"-max_total_time={seconds:g}", "-max_len=4096"]
    command += [
        "-print_final_stats=1",
        f"-artifact_prefix={binary}-",
        "-timeout=20",
        "-rss_limit_mb=2048",
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = re.search(r"number_of_executed_units:\s*(\d+)", done.stdout + done.stderr)
    if done.returncode == 0 and found:
        return int(found[1]), ""
    return 0, (done.stdout + done.stderr)[-6000:] or f"ended with status {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="for each decoder")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--engine", choices=("libfuzzer", "mutate"), help="default: what is there")
    parser.add_argument("--keep", type=pathlib.Path, help="folder that receives inputs of new coverage")
    arguments = parser.parse_args()
    engine = arguments.engine or ("libfuzzer" if compiler("libfuzzer") else "mutate")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-"))
    print(f"engine {engine} ({compiler(engine)[0]})", flush=True)
    built = build(engine, folder, widest(), arguments.targets)
    findings = 0
    for target, binary in built.items():
        corpus = [HERE / "corpus"]
        if engine == "libfuzzer":  # it writes new inputs to the first folder
            new = (arguments.keep or folder) / f"corpus-{target}"
            new.mkdir(parents=True, exist_ok=True)
            corpus.insert(0, new)
        runs, problem = fuzz(binary, arguments.seconds, corpus)
        findings += bool(problem)
        print(
            f"{target:14} {runs:>12} executions, {'no finding' if not problem else 'a finding:'}",
            flush=True,
        )
        if problem:
            print(problem)
    if findings:
        sys.exit(f"inputs are kept in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
