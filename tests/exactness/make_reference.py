"""Writes what `transformers.generate` answers to 20 shared prompts, greedily, in fp32, 128 tokens
each: `python tests/exactness/make_reference.py`. Minutes on a CPU, hence kept as a file."""

import json
from pathlib import Path

import torch
import transformers

from benchmarks.prompts import chat_prompts
from coppice.models.hub import DEFAULT_MODEL, resolve_model
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer

COUNTS = {"mt_bench": 7, "gsm8k": 7, "humaneval": 6}
TOKENS = 128


def main() -> None:
    path = resolve_model(DEFAULT_MODEL, Settings().cache_dir)
    tokenizer = Tokenizer.load(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    entries: list[dict[str, object]] = []
    for name, count in COUNTS.items():
        for index, prompt in enumerate(chat_prompts(tokenizer, name, count)):
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
            answer = out[0, len(prompt) :].tolist()
            entries.append({"set": name, "index": index, "prompt": prompt, "answer": answer})
    made = {"transformers": transformers.__version__, "torch": torch.__version__}
    target = Path(__file__).with_name("reference_tokens.json")
    target.write_text(json.dumps({"made_with": made, "entries": entries}) + "\n")


if __name__ == "__main__":
    main()
