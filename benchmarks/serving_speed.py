"""Time how many tokens a second vLLM or transformers writes, for one request and for a batch of them.

    python benchmarks/serving_speed.py FOLDER vllm --threads 1     # in vLLM's environment
    python benchmarks/serving_speed.py FOLDER transformers         # in Eckart's environment, with PYTHONPATH=.

Prints one row of a Markdown table for each batch size. This file imports nothing of Eckart unless the engine is
transformers, because vLLM has an environment of its own. Run it once for each folder: vLLM frees its memory at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from statistics import median

Write = Callable[[list[list[int]], int], object]
"""A function: prompts as token ids, all of one length, and a number of tokens → writes that many after each prompt."""

BATCHES = (1, 16)
PROMPT = 32
"""Number of tokens of each prompt."""


def in_vllm(folder: str, dtype: str, threads: int, eager: bool, tokens: int) -> tuple[int, Write]:
    """Load a folder; return the size of its vocabulary and the function that writes."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that --cpu-time counts the engine
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from vllm import LLM, SamplingParams

    longest = PROMPT + tokens
    engine = LLM(folder, dtype=dtype, enforce_eager=eager, max_model_len=longest, enable_prefix_caching=False)

    def write(prompts: list[list[int]], tokens: int) -> object:
        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)

    return engine.model_config.get_vocab_size(), write


def in_transformers(folder: str, dtype: str, threads: int) -> tuple[int, Write]:
    """Load a folder; return the size of its vocabulary and the function that writes."""
    import torch
    from transformers import AutoModelForCausalLM

    import eckart as eckart  # registers the format of compressed models with transformers

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def write(prompts: list[list[int]], tokens: int) -> object:
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            return model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )

    return model.config.vocab_size, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face folder of a language model, compressed or not")
    parser.add_argument("engine", choices=("vllm", "transformers"))
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--written", type=int, default=64, help="tokens that each request gets")
    parser.add_argument("--rounds", type=int, default=5, help="after one for warm-up")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process on a CPU that others use, too")
    asked = parser.parse_args()
    clock = time.process_time if asked.cpu_time else time.perf_counter
    if asked.engine == "vllm":
        vocabulary, write = in_vllm(asked.folder, asked.dtype, asked.threads, asked.eager, asked.written)
    else:
        vocabulary, write = in_transformers(asked.folder, asked.dtype, asked.threads)
    draw = random.Random(0)
    engine = "vLLM, eager" if asked.eager else "vLLM, compiled" if asked.engine == "vllm" else "transformers"
    for requests in BATCHES:
        speeds = []
        for number in range(1 + asked.rounds):
            prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(requests)]
            start = clock()
            write(prompts, asked.written)
            if number:
                speeds.append(requests * asked.written / (clock() - start))
        shown = f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        print(f"| {os.path.basename(os.path.normpath(asked.folder))} | {engine} | {requests} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
