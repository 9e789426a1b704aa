"""`coppice chat`: questions and streamed answers in a terminal."""

import sys
from dataclasses import dataclass, field

from rich.console import Console

from launcher.client import Answer, AnswerOptions, AnswerStream, Client, ServerError, Turn

HELP = "/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D leaves"


@dataclass(slots=True)
class Conversation:
    """The turns so far. A failed or stopped answer leaves them as they were."""

    client: Client
    options: AnswerOptions
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def reset(self) -> None:
        self.turns.clear()

    def ask(self, question: str) -> Answer:
        """Streams the answer to stdout. Raises ServerError and KeyboardInterrupt."""
        asked = [*self.turns, Turn("user", question)]
        opening = [Turn("system", self.system)] if self.system else []
        answer = print_answer(self.client.chat([*opening, *asked], self.options))
        self.turns = [*asked, Turn("assistant", answer.text)]
        return answer


def talk(
    client: Client, options: AnswerOptions, prompt: str | None, system: str | None, stats: bool
) -> None:
    """One question, all of a piped stdin as one, or a conversation at the terminal."""
    console = Console(stderr=True)
    conversation = Conversation(client, options, system)
    if prompt is None and sys.stdin.isatty():
        converse(conversation, console, stats)
        return
    answer = conversation.ask(sys.stdin.read() if prompt is None else prompt)
    if stats:
        console.print(stats_line(answer), style="dim", highlight=False, soft_wrap=True)


def print_answer(stream: AnswerStream) -> Answer:
    """Writes the pieces as they arrive, as plain text. Stops the request on Ctrl-C."""
    written = False
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
            written = True
        return stream.finish()
    finally:
        stream.cancel()
        if written:
            sys.stdout.write("\n")
            sys.stdout.flush()


def converse(conversation: Conversation, console: Console, show_stats: bool) -> None:
    """Reads questions until the end of input. A server's error ends an answer, not the chat."""
    console.print(HELP, style="dim", highlight=False)
    while True:
        try:
            question = console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question == "/reset":
            conversation.reset()
            console.print("conversation forgotten", style="dim")
        elif question in ("/exit", "/quit"):
            return
        elif question:
            answer_one(conversation, question, console, show_stats)


def answer_one(
    conversation: Conversation, question: str, console: Console, show_stats: bool
) -> None:
    try:
        answer = conversation.ask(question)
    except ServerError as error:
        console.print(f"error: {error}", style="red", markup=False)
    except KeyboardInterrupt:
        console.print("stopped", style="dim")
    else:
        if show_stats:
            console.print(stats_line(answer), style="dim", highlight=False, soft_wrap=True)


def stats_line(answer: Answer) -> str:
    """One line of what the answer cost."""
    usage = answer.usage
    parts = [
        f"{usage.completion_tokens} tokens",
        f"{answer.tokens_per_second:.1f} tokens/s",
        f"first token after {usage.time_to_first_token_seconds * 1000:.0f} ms",
    ]
    if answer.acceptance_length is not None and answer.acceptance_rate is not None:
        parts.append(f"acceptance length {answer.acceptance_length:.2f}")
        parts.append(f"acceptance rate {answer.acceptance_rate:.0%}")
    else:
        parts.append("plain decoding")
    if answer.was_cut:
        parts.append("cut by its length limit")
    return " · ".join(parts)
