"""Writes the random Qwen3 of 138 million parameters that reference/qwen3-rand-systemone.json speaks of.

    python make_qwen3_rand.py SMOLLM2.gguf FOLDER

It has an architecture that vLLM's /v1/systemone serves, and about the size of
SmolLM2, whose vocabulary it takes: so the two servers can be compared on the
same weights. Needs torch and transformers; the versions are in README.md.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# transformers' reader of GGUF files loses that SmolLM2 splits numbers into digits.
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def main() -> None:
    gguf, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(json.dumps({**tokenizer, "pre_tokenizer": PRE_TOKENIZER}, ensure_ascii=False))
    (out / "chat_template.jinja").write_text(CHATML)

    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16384,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    torch.manual_seed(1234)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main()
