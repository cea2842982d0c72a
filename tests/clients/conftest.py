"""The servers that the tests talk to. Each lives as long as the tests that use it, and has to stop cleanly."""

import os
import shutil
from pathlib import Path

import openai
import pytest
from server import ROOT, TINY, Server, free_port

# `strong` is another Forkpoint; nobody listens where `dead` points.
MAIN = """
[routes]
chain = ["scripted"]

[upstreams.strong]
url = "{strong}/v1"
model = "qwen3-tiny"

[upstreams.dead]
url = "http://127.0.0.1:{dead}/v1"
model = "any"
timeout_ms = 2000

[tools.clock]
description = "Tells the time"
"""

# Small bounds, so that tests reach them.
STRICT = """
[server]
max_body_bytes = "64KiB"
max_in_flight = 4
request_timeout_ms = 4000
"""


def serve(factory, name: str, **options):
    server = Server(factory.mktemp(name), **options)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def strong(tmp_path_factory):
    """A random model: the upstream that policies forward to."""
    yield from serve(tmp_path_factory, "strong", model=TINY)


def rebuilt(component):
    """The same component as the folder FORKPOINT_TEST_PLUGINS has it: the tests' run has just built it anew."""
    folder = os.environ.get("FORKPOINT_TEST_PLUGINS")
    return Path(folder, component.name) if folder else component


@pytest.fixture(scope="session")
def server(tmp_path_factory, strong):
    """The default model, the bundled policies and the scripted one."""
    plugins = tmp_path_factory.mktemp("plugins")
    for component in [*sorted((ROOT / "plugins").glob("*.wasm")), ROOT / "tests/fixtures/scripted.wasm"]:
        shutil.copy(rebuilt(component), plugins)
    for probes in sorted((ROOT / "plugins").glob("*.probes")):
        shutil.copytree(probes, plugins / probes.name)
    config = MAIN.format(strong=strong.url, dead=free_port())
    yield from serve(tmp_path_factory, "main", config=config, plugins=plugins)


@pytest.fixture(scope="session")
def strict(tmp_path_factory):
    """A random model behind small bounds."""
    yield from serve(tmp_path_factory, "strict", config=STRICT, model=TINY)


@pytest.fixture(scope="session")
def keyed(tmp_path_factory):
    """A random model that asks for a key."""
    config = '[server]\napi_keys_env = "TEST_KEYS"\n'
    yield from serve(
        tmp_path_factory, "keyed", config=config, model=TINY, env={"TEST_KEYS": "sk-one, sk-two"}
    )


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's client as users make it; a retry would hide a failure."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client
