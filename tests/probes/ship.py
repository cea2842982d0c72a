#!/usr/bin/env python3
"""Writes the examples that bundled policies ship, out of tests/data/probes.

    tests/probes/ship.py            write plugins/<policy>.probes/*.jsonl
    tests/probes/ship.py --check    fail when one is not what this would write

A policy ships the short examples alone: they say as much as the long ones, and are fitted in seconds where a server
runs another model than the default one. `forkpoint probe fit` then writes the fitted probe beside them.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data" / "probes"

# Which probes each policy asks.
POLICIES = {
    "auto": ["shell", "destructive", "output", "difficulty"],
    "shell-gate": ["shell", "destructive"],
    "cheap-or-strong": ["difficulty", "personal-data"],
    "four-tier": ["difficulty"],
    "injection-guard": ["injection"],
    "privacy": ["personal-data"],
}

# Words of the last turn that a shipped example has at most.
WORDS = 40


def shipped(name: str) -> str:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [lines[0]]
    for line in lines[1:]:
        row = json.loads(line)
        text = row["text"] if "text" in row else row["messages"][-1]["content"]
        # A conversation costs more tokens than it teaches.
        if "text" in row and len(text.split()) <= WORDS:
            kept.append(line)
    return "".join(kept)


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for policy, probes in POLICIES.items():
        folder = ROOT / "plugins" / f"{policy}.probes"
        folder.mkdir(exist_ok=True)
        for probe in probes:
            path, text = folder / f"{probe}.jsonl", shipped(probe)
            if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
                stale.append(str(path.relative_to(ROOT)))
            elif not check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path} is not what tests/probes/ship.py writes", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
