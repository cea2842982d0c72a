"""A policy is replaced while clients stream: no request fails, and each is answered whole by one version. FORKPOINT_HOUR=5
makes it a thousand replacements."""

import os
import re
import threading
import time
from pathlib import Path

import openai
import pytest
from server import ROOT, TINY, Server

CLIENTS = 8
SWAPS = 200 * int(os.environ.get("FORKPOINT_HOUR", "1"))
FIXTURES = ROOT / "tests/fixtures"


@pytest.fixture
def subject(tmp_path):
    """A random model, a policy `swapped` in its first version, and a neighbour that streams from the model."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "swapped.wasm").write_bytes((FIXTURES / "reply-v1.wasm").read_bytes())
    (plugins / "neighbour.wasm").write_bytes((FIXTURES / "scripted.wasm").read_bytes())
    server = Server(tmp_path, plugins=plugins, model=TINY)
    yield server
    server.stop()


def resident_mib(server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024


def open_files(server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def wait_for(what: str, happened, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} took longer than {seconds} s"
        time.sleep(0.01)


class Client(threading.Thread):
    """Streams requests to both policies, one after the other, until it is told to stop."""

    def __init__(self, server, done: threading.Event):
        super().__init__()
        self.client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60)
        self.done = done
        self.answers: dict[str, set[str]] = {}
        self.count = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.done.is_set():
                version, text = self.stream("swapped", "Which version answers?")
                assert text in ("v1", "v2"), text
                self.answers.setdefault(version, set()).add(text)
                # The same reply each time: others would fill the cache of pages, which is meant to grow.
                self.stream("neighbour", "temperature:0\nmax-tokens:6\ngenerate")
                self.count += 1
        except Exception as error:
            self.error = error

    def stream(self, model: str, content: str) -> tuple[str, str]:
        message = {"role": "user", "content": content}
        raw = self.client.chat.completions.with_raw_response.create(model=model, messages=[message], stream=True)
        text, reason = "", None
        for chunk in raw.parse():
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        assert reason in ("stop", "length"), f"{model}: the stream ended with {reason}"
        return raw.headers["x-forkpoint-version"], text


def test_swaps_fail_no_stream(subject):
    target = subject.folder / "plugins/swapped.wasm"
    versions = [(FIXTURES / f"reply-v{n}.wasm").read_bytes() for n in (1, 2)]
    done = threading.Event()
    clients = [Client(subject, done) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    status = lambda: subject.get("/v1/policies/swapped")  # noqa: E731
    early = 0
    try:
        for swap in range(1, SWAPS + 1):
            loads = status()["loads"]
            if swap % 2:
                # As editors and package managers do it.
                fresh = target.with_suffix(".tmp")
                fresh.write_bytes(versions[1])
                os.replace(fresh, target)
            else:
                target.write_bytes(versions[0])
            wait_for(f"swap {swap}", lambda: status()["loads"] > loads)
            if swap in (SWAPS // 3, 2 * SWAPS // 3):
                target.write_bytes(b"\0asm and no more")
                wait_for("the refusal of garbage", lambda: status()["last_error"] is not None)
                assert status()["state"] == "serving"
            if swap == SWAPS // 2:
                early, files = resident_mib(subject), open_files(subject)
    finally:
        done.set()
        for client in clients:
            client.join()
    late, files_late = resident_mib(subject), open_files(subject)

    assert [client.error for client in clients] == [None] * CLIENTS
    answers: dict[str, set[str]] = {}
    for client in clients:
        for version, texts in client.answers.items():
            answers.setdefault(version, set()).update(texts)
    assert sorted(map(sorted, answers.values())) == [["v1"], ["v2"]], "one version, one answer"
    assert all(client.count >= 5 for client in clients)
    print(f"{early} MiB and {files} files half way, {late} MiB and {files_late} files at the end")
    # Those of the clients' connections come and go.
    assert files_late <= files + CLIENTS
    assert late <= early + 12, f"{early} MiB half way, {late} MiB at the end"
    subject.wait_until_nothing_is_held()
