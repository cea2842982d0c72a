"""jevcompat, the conformance suite of System One servers (specification 0.1)."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
from server import free_port

# Until a choice may have 255 options. A requirement that begins to pass has to leave this set.
KNOWN = {"choice.options"}


def jevcompat(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from jevcompat.cli import main; sys.exit(main())", *arguments]


def run(url: str, folder, *options: str) -> dict:
    """A run's report."""
    out = folder / "report.json"
    done = subprocess.run(
        jevcompat("test", url, "--json", str(out), *options), capture_output=True, text=True, timeout=900
    )
    print(done.stdout)
    assert out.exists(), done.stdout + done.stderr
    return json.loads(out.read_text())


def check(report: dict, known: set[str]) -> None:
    """Every MUST passed, but for exactly those known to fail; nothing was left untested."""
    assert not report["aborted"], report["aborted"]
    assert not report["inconclusive"] and not report["case_errors"], (
        report["inconclusive"] + report["case_errors"]
    )
    musts = {result["id"]: result["status"] for result in report["results"] if result["level"] == "MUST"}
    assert len(musts) == 33, sorted(musts)
    failed = {name for name, status in musts.items() if status == "fail"}
    assert failed == known, f"MUST failed: {sorted(failed)}, known: {sorted(known)}"
    # One of the two rules about keys never applies.
    skipped = {name for name, status in musts.items() if status == "skip"}
    assert len(skipped) == 1 and skipped <= {"auth.bearer", "auth.ignored-when-off"}, skipped
    for level in ("MUST", "SHOULD"):
        score = report["summary"][level]
        print(f"jevcompat {level}: {score['passed']} of {score['tested']}")


def test_every_must_holds_but_the_known(server, tmp_path):
    report = run(server.url, tmp_path)
    check(report, KNOWN)
    findings = [f for r in report["results"] if r["id"] == "choice.options" for f in r["findings"]]
    refused = {finding["case"].split(":")[-1] for finding in findings}
    assert refused <= {"64", "128", "255"}, f"refused: {refused} options"


@pytest.fixture(scope="module")
def report_with_key(keyed, tmp_path_factory):
    """With a key every SHOULD applies."""
    return run(keyed.url, tmp_path_factory.mktemp("report"), "--key", "sk-one")


def test_every_must_holds_with_a_key(report_with_key):
    check(report_with_key, KNOWN)


def test_every_should_holds(report_with_key):
    shoulds = {r["id"]: r["status"] for r in report_with_key["results"] if r["level"] == "SHOULD"}
    assert shoulds and {name for name, status in shoulds.items() if status != "pass"} == set()


@contextmanager
def mock(*faults: str):
    """jevcompat's own server, broken on purpose."""
    port = free_port()
    options = [word for fault in faults for word in ("--fault", fault)]
    process = subprocess.Popen(
        jevcompat("mock", "--port", str(port), *options), stderr=subprocess.PIPE, text=True
    )
    try:
        assert "mock on" in process.stderr.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()


def test_the_check_accepts_what_is_known(tmp_path):
    with mock("cap-64") as url:
        check(run(url, tmp_path), {"choice.options"})


@pytest.mark.parametrize("faults", [(), ("cap-64", "reject-jev-latest"), ("cap-64", "500-on-unknown-type")])
def test_the_check_notices_one_more_and_one_less(tmp_path, faults):
    with mock(*faults) as url:
        report = run(url, tmp_path)
    with pytest.raises(AssertionError, match="MUST failed"):
        check(report, {"choice.options"})
