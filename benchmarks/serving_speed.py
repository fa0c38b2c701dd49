"""Time how many tokens a second an engine writes with several forms of a language model, for one request and for many.

    python benchmarks/serving_speed.py vllm ORIGINAL FOLDER …            # in vLLM's environment
    python -m benchmarks.serving_speed transformers ORIGINAL FOLDER …    # or onnxruntime, int8: in Eckart's environment

Prints a Markdown table, with ratios to the first folder. Each folder runs in a process of its own, and in each round
every one of them answers the same requests in turn. onnxruntime and int8 read what `eckart export NAME FOLDER` writes.
This file imports nothing of Eckart unless the engine needs it, because vLLM has an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

Write = Callable[[list[list[int]], int], object]
"""A function: prompts as token ids, all of one length, and a number of tokens → writes that many after each prompt."""

PROMPT = 16
"""Number of tokens of each prompt."""


def in_vllm(asked: argparse.Namespace, folder: str) -> Write:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that --cpu-time counts the engine
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=asked.dtype,
        enforce_eager=asked.eager,
        max_model_len=PROMPT + asked.written,
        enable_prefix_caching=False,
    )

    def write(prompts: list[list[int]], tokens: int) -> object:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    return write


def in_transformers(asked: argparse.Namespace, folder: str) -> Write:
    import torch
    from transformers import AutoModelForCausalLM

    import eckart as eckart  # registers the format of compressed models with transformers

    torch.set_num_threads(asked.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, asked.dtype)).eval()

    def write(prompts: list[list[int]], tokens: int) -> object:
        inputs = torch.tensor(prompts)
        mask, limits = torch.ones_like(inputs), {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.inference_mode():
            return model.generate(inputs, attention_mask=mask, do_sample=False, **limits)

    return write


def in_onnxruntime(asked: argparse.Namespace, folder: str) -> Write:
    import torch

    from benchmarks import generation
    from eckart.onnx import runner

    name = "model_quantized.onnx" if asked.engine == "int8" else "model.onnx"
    answer = runner(Path(folder) / "onnx" / name, asked.threads)

    def write(prompts: list[list[int]], tokens: int) -> object:
        inputs = torch.tensor(prompts)
        prompt = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
        return generation.write(lambda given: generation.in_onnxruntime(answer, given), prompt, tokens - 1)

    return write


ENGINES = {"vllm": in_vllm, "transformers": in_transformers, "onnxruntime": in_onnxruntime, "int8": in_onnxruntime}


def serve(connection: Connection, asked: argparse.Namespace, folder: str) -> None:
    """Load `folder`, say so, and from then on answer prompts with the seconds that the engine took for them."""
    write = ENGINES[asked.engine](asked, folder)
    clock = time.process_time if asked.cpu_time else time.perf_counter
    connection.send(None)
    while prompts := connection.recv():
        start = clock()
        write(prompts, asked.written)
        connection.send(clock() - start)


def start(asked: argparse.Namespace, folder: str) -> Connection:
    """Return the connection to a new process that serves `folder`, once it has loaded."""
    context = get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(there, asked, folder)).start()
    there.close()  # so that a process that fails ends the wait
    here.recv()
    return here


def ask(connection: Connection, prompts: list[list[int]]) -> float:
    connection.send(prompts)
    return connection.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="of Hugging Face; the first is the original")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="numbers of requests at a time")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--written", type=int, default=32, help="tokens that each request gets")
    parser.add_argument("--rounds", type=int, default=5, help="after one for warm-up")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of each process on a CPU that others use, too")
    asked = parser.parse_args()
    vocabulary = json.loads((Path(asked.folders[0]) / "config.json").read_text())["vocab_size"]
    models = {folder: start(asked, folder) for folder in asked.folders}
    draw = random.Random(0)
    print("| model | requests | tokens per second | ÷ original |\n|---|--:|--:|--:|")
    for requests in asked.requests:
        rounds = []
        for _ in range(1 + asked.rounds):
            prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(requests)]
            rounds.append([ask(model, prompts) for model in models.values()])
        for place, folder in enumerate(models):
            seconds = median(each[place] for each in rounds[1:])
            ratios = [each[0] / each[place] for each in rounds[1:]]
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(
                f"| {Path(folder).name} | {requests} | {requests * asked.written / seconds:.1f} | {spread} |",
                flush=True,
            )
    for model in models.values():
        model.send(None)


if __name__ == "__main__":
    main()
