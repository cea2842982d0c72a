"""A server under test: started as a user starts it, stopped as an operator does."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/data/qwen3-tiny"

# Loading and compiling policies for the first time take seconds on two cores.
START_SECONDS = 180
STOP_SECONDS = 60


class Server:
    """`forkpoint serve` on a free loopback port, in an empty folder of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        config: str = "",
        plugins: Path | None = None,
        model: str | None = None,
        env=None,
        before=None,
    ):
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "forkpoint.toml").write_text(config)
        if plugins is None:
            plugins = folder / "plugins"
            plugins.mkdir(exist_ok=True)
        command = [binary(), "serve", "--port", str(self.port), "--plugins", str(plugins)]
        command += ["--model", str(model)] if model else []
        # What the developer has set for servers of their own does not count here.
        ours = {key: value for key, value in os.environ.items() if not is_setting(key)}
        self.log = (folder / "log.txt").open("wb")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            # State that outlives the server is for the tests that are about it.
            env={**ours, "FORKPOINT_STATE": "memory", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            preexec_fn=before,
        )
        self._wait_until_healthy()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log_text()}")
            try:
                if self.get("/health")["status"] == "ok":
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        self.process.kill()
        raise AssertionError(f"not healthy after {START_SECONDS} s:\n{self.log_text()}")

    def stop(self) -> None:
        """SIGTERM to this process alone; it must end by itself, with 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(
                f"still running {STOP_SECONDS} s after SIGTERM:\n{self.log_text()}"
            ) from None
        finally:
            self.log.close()
        assert code == 0, f"the server ended with {code} after SIGTERM:\n{self.log_text()}"

    def log_text(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")[-4000:]

    def get(self, path: str):
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            body = response.read()
        return (
            json.loads(body) if response.headers.get_content_type() == "application/json" else body.decode()
        )

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = [
            line for line in self.get("/metrics").splitlines() if line.split("{")[0].split(" ")[0] == name
        ]
        assert lines, f"/metrics has no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def held(self) -> tuple[float, float]:
        """Sessions and replies alive, and the pages they hold."""
        alive = self.metric("forkpoint_engine_sessions") + self.metric("forkpoint_engine_waiting")
        return alive, self.metric("forkpoint_engine_pages_held")

    def wait_until_nothing_is_held(self, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while (held := self.held()) != (0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        alive, pages = held
        assert held == (0, 0), f"{alive:.0f} sessions and replies hold {pages:.0f} pages after {seconds} s"


def binary() -> str:
    return os.environ.get("FORKPOINT", str(ROOT / "target/release/forkpoint"))


def is_setting(name: str) -> bool:
    return name.startswith(("FORKPOINT_", "OTEL_")) and name != "FORKPOINT_CACHE"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
