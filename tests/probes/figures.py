#!/usr/bin/env python3
"""Writes the table of docs/probes.md and the curves of docs/probes.svg from what `forkpoint probe eval --json` found.

    tests/probes/figures.py RESULTS.json docs/probes.md docs/probes.svg
"""

import json
import pathlib
import sys

BEGIN, END = "<!-- figures: tests/probes/run -->", "<!-- end of figures -->"
COLOURS = ["#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#00798c", "#8d5b4c", "#555555"]


def share(value) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(results: dict) -> str:
    lines = [
        "| question | labels | examples | commonest label | label reads | probe | plain / pairs | ECE | scope |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for question in results["questions"]:
        tags = question["tags"]
        lines.append(
            f"| {question['name']} | {len(question['labels'])} | {question['examples']} | {share(question['majority'])} "
            f"| {share(question['label_reads'])} | {share(question['accuracy'])} "
            f"| {share(tags.get('plain'))} / {share(tags.get('pair'))} | {question['ece']:.3f} | {share(question['scope'])} |"
        )
    plain, pair = (mean(results, tag) for tag in ("plain", "pair"))
    lines.append(
        f"| **mean** | | | {share(results['majority'])} | {share(results['label_reads'])} "
        f"| **{share(results['accuracy'])}** | {share(plain)} / {share(pair)} | {results['ece']:.3f} | {share(results['scope'])} |"
    )
    lines += ["", f"{results['model']}, {results['per_label']} examples a label, {results['repeats']} draws in either "
              f"direction between the halves; {results['device']}.", ""]
    tags = [tag for tag in ("de", "pt", "adversarial", "short", "long")]
    lines += ["| accuracy on | " + " | ".join(tags) + " |", "|---|" + "---|" * len(tags)]
    for question in results["questions"]:
        lines.append(f"| {question['name']} | " + " | ".join(share(question["tags"].get(tag)) for tag in tags) + " |")
    return "\n".join(lines) + "\n"


def mean(results: dict, tag: str):
    values = [question["tags"][tag] for question in results["questions"] if tag in question["tags"]]
    return sum(values) / len(values) if values else None


def curves(results: dict) -> str:
    """Accuracy over examples a label, as SVG: one line a question."""
    width, height, left, right, top, bottom = 720, 420, 60, 170, 30, 50
    counts = [count for count, _ in results["questions"][0]["curve"]]
    place = {count: left + i * (width - left - right) / (len(counts) - 1) for i, count in enumerate(counts)}
    low = 0.2

    def at(value: float) -> float:
        return top + (1.0 - value) / (1.0 - low) * (height - top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18">Accuracy on held-out families, over examples a label ({results["model"]})</text>',
    ]
    for tenth in range(2, 11, 2):
        y = at(tenth / 10)
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for count in counts:
        out.append(f'<text x="{place[count]:.1f}" y="{height - bottom + 20}" text-anchor="middle">{count}</text>')
    ends = sorted(results["questions"], key=lambda question: -question["curve"][-1][1])
    labels = {}
    for question in ends:
        y = at(question["curve"][-1][1])
        # Names that would lie over one another move down.
        labels[question["name"]] = max(y, max(labels.values(), default=0) + 14)
    for colour, question in zip(COLOURS, results["questions"]):
        points = " ".join(f"{place[count]:.1f},{at(value):.1f}" for count, value in question["curve"])
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = labels[question["name"]]
        out.append(f'<text x="{width - right + 8}" y="{y + 4:.1f}" fill="{colour}">{question["name"]}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    results = json.loads(pathlib.Path(sys.argv[1]).read_text())
    page = pathlib.Path(sys.argv[2])
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}")
    pathlib.Path(sys.argv[3]).write_text(curves(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
