"""llama.cpp on the same model in bf16, from an environment of its own that has llama-cpp-python."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from coppice.errors import StartError

TIMEOUT_SECONDS = 300.0
TOKENS = 128
OF_THE_WRITER = ("general.architecture", "general.file_type")  # and all that begins with "GGUF."

# One token after the other, each the likeliest.
PROGRAM = """
import json, statistics, sys, time
import numpy as np
from llama_cpp import Llama, llama_get_logits_ith

path, threads, tokens, prompt = sys.argv[1], *map(json.loads, sys.argv[2:])
model = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

def likeliest():
    logits = llama_get_logits_ith(model.ctx, -1)
    return int(np.argmax(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),))))

def answer():
    model.reset()
    model.eval(prompt)
    said = [likeliest()]
    started = time.perf_counter()
    for _ in range(tokens):
        model.eval(said[-1:])
        said.append(likeliest())
    return (time.perf_counter() - started) / tokens

print(statistics.median(answer() for _ in range(3)))
"""


def write_bf16(source: Path, path: Path) -> None:
    """The model of the GGUF file `source` once more, its matrices in bf16 and all else in fp32."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in OF_THE_WRITER:
            kind = field.types[0]
            part = field.types[-1] if kind is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, part)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            bf16 = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def greedy_seconds(python: Path, model: Path, prompt: Sequence[int]) -> float:
    """Of a token of a greedy answer on all cores, without its prompt: the median of three answers.
    Raises StartError when it fails."""
    threads = len(os.sched_getaffinity(0))
    given = [str(model), *(json.dumps(each) for each in (threads, TOKENS, list(prompt)))]
    ran = subprocess.run(
        [str(python), "-c", PROGRAM, *given],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if ran.returncode:
        last = " | ".join(ran.stderr.strip().splitlines()[-3:])
        raise StartError(f"llama.cpp failed: {last}")
    return float(ran.stdout.strip().splitlines()[-1])
