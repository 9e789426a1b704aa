"""The process in which `GrammarTrial` compiles grammars: a line of JSON in, a line out."""

import contextlib
import json
import resource
import signal
import sys

from coppice.grammar import GrammarCompiler, GrammarError
from coppice.request import StructuredOutput

COMPILE_SECONDS = 2.0  # of a processor, so that a busy machine refuses no more than an idle one
MEMORY_BYTES = 1 << 30


def main() -> None:
    """First line: the tokenizer. Then grammars, of which each is answered with what is wrong with
    it, or an empty string. A signal ends the process when one takes too long."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    setup = json.loads(sys.stdin.buffer.readline())
    compiler = GrammarCompiler(
        lambda: setup["tokenizer"], setup["vocab_size"], setup["eos_token_ids"]
    )
    with contextlib.suppress(GrammarError):  # every grammar will be answered with it
        _ = compiler.tokens  # before the clock runs
    _answer("ready")
    for line in sys.stdin.buffer:
        output = StructuredOutput.model_validate_json(line)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
        try:
            compiler.compile(output)
        except GrammarError as error:
            reason = str(error)
        else:
            reason = ""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(reason)


def _answer(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main()
