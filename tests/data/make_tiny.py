"""Writes the small random checkpoints of this folder, and what transformers
says of each.

    python make_tiny.py [FOLDER]

Needs torch, transformers, tokenizers, safetensors and numpy; the versions used
are in README.md. The same versions on the same kind of machine write the same
bytes. Each checkpoint is a folder as Hugging Face has them, below 400 kB, with
`expected.json` beside the weights.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 320
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Words that become one token each: what ChatML and questions are written with.
WORDS = "yes no Yes No user assistant system Answer Question".split() + [
    " yes",
    " no",
    " Yes",
    " No",
    " the",
    " of",
    " one",
    " or",
    " with",
]

# ChatML; tools are shown in the system turn, calls as JSON between tags.
CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}{{ first.content + '\\n' if first else '' }}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and first and loop.first) -%}
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

CHECKPOINTS = {
    # A head's size of its own (4 heads of 32 on a width of 64), a norm on
    # queries and keys, the head tied to the embedding.
    "qwen3-tiny": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **SHAPE,
            head_dim=32,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        )
    ),
    # A head of its own matrix, and Llama 3's rotary scaling, with an original
    # context short enough that 200 positions meet all three of its ranges.
    "llama-tiny": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            head_dim=32,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    # Biases on queries, keys and values; heads of 16, the smallest.
    "qwen2-tiny": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SHAPE,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ),
}

# One prompt of each type of question, as a chat's last turn.
DECISIONS = {
    "boolean": (
        "Question: Does the customer ask for a refund?\nyes\nno\nAnswer with yes or no only.",
        ["yes", "no"],
    ),
    "choice": (
        "Question: Which team?\nA: billing\nB: technical\nC: sales\nD: none\n"
        "Answer with the letter of one option only.",
        ["A", "B", "C", "D"],
    ),
    "score": (
        "Question: How urgent?\n0: low\n1: medium\n2: high\nAnswer with the number of one level only.",
        ["0", "1", "2"],
    ),
}
STATE = "Customer: my invoice for March was charged twice.\n\n"
LENGTHS = [1, 5, 17, 64, 200]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: 3 specials, 256 bytes, and merges that make WORDS."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: i for i, token in enumerate(SPECIALS + sorted(letters))}
    merges: list[tuple[str, str]] = []

    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
        )
        return tokenizer

    tokenizer = build()
    for word in WORDS:
        # Merges later in the list never undo what earlier ones make.
        while len(pieces := tokenizer.encode(word).tokens) > 1:
            merges.append((pieces[0], pieces[1]))
            vocab.setdefault(pieces[0] + pieces[1], len(vocab))
            tokenizer = build()
    # The rows that are left stand for pairs that text is full of.
    for pair in ["in", "er", "on", "re", "an", "at", "en", "is", "or", "th", "ou", "ing"]:
        if len(vocab) == VOCAB:
            break
        while len(vocab) < VOCAB and len(pieces := tokenizer.encode(pair).tokens) > 1:
            merges.append((pieces[0], pieces[1]))
            vocab.setdefault(pieces[0] + pieces[1], len(vocab))
            tokenizer = build()
    assert len(vocab) <= VOCAB, f"{len(vocab)} tokens do not fit {VOCAB} rows"
    assert len(vocab) == VOCAB, f"{VOCAB - len(vocab)} rows have no token"
    return tokenizer


def prove_labels(tokenizer: Tokenizer) -> None:
    """Every label is one token of its own where a reply starts."""
    start = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    before = tokenizer.encode(start).ids
    labels = [chr(c) for c in range(ord("A"), ord("Z") + 1)] + [str(d) for d in range(10)]
    seen = set()
    for label in labels + ["yes", "no", " yes", " no", "Yes", "No"]:
        ids = tokenizer.encode(start + label).ids
        assert ids[:-1] == before, f"{label!r} is not one token after {start!r}: {ids}"
        seen.add(ids[-1])
    assert len(seen) == len(labels) + 6


def randomise(model: torch.nn.Module) -> None:
    """Weights that make every part matter: norms off 1, biases off 0, attention
    that looks somewhere, and logits that spread over a few nats."""
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        if name.endswith("norm.weight"):
            weight.data = 1.0 + 0.25 * noise
        elif name.endswith(".bias"):
            weight.data = 0.5 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            weight.data = 0.12 * noise
        else:
            weight.data = noise * weight.shape[1] ** -0.5


def last_logprobs(model: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, float]:
    """ln p of the next token, and the logsumexp of its logits."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    total = torch.logsumexp(logits, -1)
    return logits - total, total.item()


def case(model: torch.nn.Module, ids: list[int]) -> dict:
    logprobs, total = last_logprobs(model, ids)
    top = torch.topk(logprobs, 20)
    return {
        "token_ids": ids,
        "top20": [
            [token, round(value, 6)] for value, token in zip(top.values.tolist(), top.indices.tolist())
        ],
        "logsumexp": round(total, 6),
        "min_logprob": round(logprobs.min().item(), 6),
        "entropy": round(-(logprobs.exp() * logprobs).sum().item(), 6),
    }


def decision(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, kind: str) -> dict:
    question, labels = DECISIONS[kind]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": STATE + question}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    logprobs, _ = last_logprobs(model, ids)
    tokens = {label: tokenizer.encode(label, add_special_tokens=False) for label in labels}
    assert all(len(token) == 1 for token in tokens.values())
    first = {label: token[0] for label, token in tokens.items()}
    chosen = torch.stack([logprobs[token] for token in first.values()])
    shares = torch.softmax(chosen, -1).tolist()
    return {
        "type": kind,
        "text": text,
        "token_ids": ids,
        "labels": {
            label: {"id": token, "logprob": round(logprobs[token].item(), 6), "share": round(share, 6)}
            for (label, token), share in zip(first.items(), shares)
        },
        "mass": round(chosen.exp().sum().item(), 6),
    }


def write(folder: Path, seed: int, make, tokenizer: Tokenizer) -> None:
    torch.manual_seed(seed)
    model = make()
    randomise(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(tokenizer),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE["max_position_embeddings"],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)

    exact = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(len(SPECIALS), VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = {
        "about": "transformers, f32 arithmetic on the bf16 weights; logarithms are natural",
        "parameters": sum(p.numel() for p in exact.parameters()),
        "cases": [case(exact, ids) for ids in sequences],
        "decisions": [decision(exact, wrapped, kind) for kind in DECISIONS],
    }
    lines = json.dumps(expected, ensure_ascii=False).replace(', {"token_ids"', ',\n  {"token_ids"')
    (folder / "expected.json").write_text(lines.replace(', {"type"', ',\n  {"type"') + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 400_000, f"{folder} is {size} bytes"
    print(f"{folder.name}: {expected['parameters']} parameters, {size} bytes")


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    tokenizer = make_tokenizer()
    prove_labels(tokenizer)
    for seed, (name, make) in enumerate(CHECKPOINTS.items(), start=20):
        write(out / name, seed, make, tokenizer)


if __name__ == "__main__":
    main()
