"""What a result depends on besides the programs: the machine and how busy it was."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import cache

# Instruction sets that decide which kernels each side has.
INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_int8", "amx_bf16"),
)


def facts() -> dict:
    """Processor, memory and system of this machine."""
    flags = cache.processor_flags()
    return {
        "date": now(),
        "processor": field("/proc/cpuinfo", "model name"),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": cores(),
        "memory": field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "compiler": first_line(["cc", "--version"]),
        "forkpoint": first_line([str(cache.forkpoint()), "--version"]),
        "forkpoint_sha256": cache.sha256(cache.forkpoint()),
        "commit": first_line(["git", "-C", str(cache.ROOT), "describe", "--always", "--dirty", "--abbrev=12"]),
    }


def cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def load() -> float:
    """Runnable tasks, as a mean over the last minute."""
    return round(os.getloadavg()[0], 2)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def field(file: str, name: str) -> str:
    """The first value under a name in one of /proc's lists."""
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def first_line(command: list[str]) -> str:
    """What a program says first, or that it is not there."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.splitlines()
    except OSError as error:
        return str(error)
    return lines[0] if lines else "unknown"
