"""`coppice train evaluate`: how much of the target's answers a head guesses right, and what for.

Answers end where the target ends them (`benchmarks.decode` goes on to the last token wanted). On a
CPU target and head run in fp32 unless a dtype is given: that is the fastest there, and changes the
bits of answers and trees alike, so it is the same measure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coppice.errors import StartError
from coppice.models.decoder import Decoder
from coppice.models.hub import resolve_model
from coppice.models.loading import load_target
from coppice.models.placement import choose_device, choose_dtype, dtype_name
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from coppice.tree import MAX_ROWS
from drafter_svc.building import build_drafter
from drafter_svc.drafter import Drafter
from kernels import ops
from training.acceptance import SESSIONS, Acceptance, acceptance
from training.costs import draft_seconds, lengths_everywhere, step_seconds
from training.dataset import Sample
from training.generation import Generator, questions
from training.prompts import read_prompts
from training.shapes import WIDTH, Costs, Lengths, Rated, WholeTrees, rate

# The best shape is looked for with so many answers, so far.
SHAPE_ANSWERS, SHAPE_TOKENS = 8, 64


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    prompts: Sequence[Path]  # a set each, called after its file
    count: int  # of prompts of each set, the first ones
    tokens: int  # of an answer at most
    temperatures: Sequence[float]
    nodes: Sequence[int]  # drafted ones of a tree at most; the root comes on top
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """Of one set of prompts, at one temperature, with trees of one size."""

    prompts: str  # the set's name
    temperature: float
    nodes: int
    acceptance: Acceptance

    @property
    def rows(self) -> int:
        return self.nodes + 1


@dataclass(frozen=True, slots=True)
class BestShape:
    """By the measured costs of this machine."""

    plain: Rated
    best: Rated  # of the shapes that draft
    costs: Costs

    @property
    def pays(self) -> bool:
        return self.best.tokens_per_second > self.plain.tokens_per_second


@dataclass(frozen=True, slots=True)
class Evaluation:
    head: str  # identity
    target: str  # name
    dtype: str
    depth: int  # of the trees at most
    top_k: int
    options: EvaluateOptions
    results: Sequence[Result]
    shape: BestShape | None  # None: the drafter's trees have no width


def evaluate(settings: Settings, options: EvaluateOptions, console: Console) -> Evaluation:
    """Judges the drafter of the settings. Raises StartError."""
    ops.set_threads(settings.verifier.threads)
    settings = judged(settings)
    path = resolve_model(settings.model.path, settings.cache_dir)
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    model = load_target(path, dtype, device, settings.model.max_context)
    longest = model.config.max_context - options.tokens
    sets = read_sets(Tokenizer.load(path), options.prompts, options.count, longest)
    most = max(map(len, chain.from_iterable(sets.values()))) + options.tokens
    settings = with_draft_slots(settings, most)
    drafter = build_drafter(settings)
    with progress_bar(console) as progress:
        runs = len(sets) * len(options.temperatures)
        task = progress.add_task("", total=runs * (1 + len(options.nodes)) + 1)

        def note(doing: str, done: int) -> None:
            progress.update(task, description=doing, advance=done)

        results, coldest = replay(model, drafter, sets, options, note)
        note("best static shape", 0)
        shape = best_shape(settings, model, mixed(coldest))
        note("done", 1)
    speculation = settings.speculation
    return Evaluation(
        head=drafter.identity,
        target=settings.model.path,
        dtype=dtype_name(dtype),
        depth=speculation.depth,
        top_k=speculation.top_k,
        options=options,
        results=results,
        shape=shape,
    )


def replay(
    model: Decoder,
    drafter: Drafter,
    sets: Mapping[str, Sequence[Sequence[int]]],
    options: EvaluateOptions,
    note: Callable[[str, int], None],
) -> tuple[list[Result], list[list[Sample]]]:
    """Of all sets, temperatures and sizes; and the answers at the lowest temperature, by set.
    `note` is told what is being done, and how much has been done since."""
    results: list[Result] = []
    coldest: list[list[Sample]] = []
    for name, prompts in sets.items():
        for temperature in options.temperatures:
            doing = f"{name}, temperature {temperature:g}"
            note(doing, 0)
            samples = answers(model, drafter, prompts, temperature, options)
            note(doing, 1)
            if temperature == min(options.temperatures):
                coldest.append(samples)
            for nodes in options.nodes:
                counted = acceptance(drafter, samples, nodes)
                results.append(Result(name, temperature, nodes, counted))
                note(doing, 1)
    return results, coldest


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    )


def judged(settings: Settings) -> Settings:
    """In fp32 on a CPU, if no dtype was given."""
    if settings.model.dtype != "auto" or choose_device(settings.model.device).type != "cpu":
        return settings
    model = settings.model.model_copy(update={"dtype": "float32"})
    return settings.model_copy(update={"model": model})


def with_draft_slots(settings: Settings, longest: int) -> Settings:
    """With room to draft for all replayed answers at once, of `longest` tokens at most."""
    slots = max(settings.drafter.kv_slots, SESSIONS * (longest + MAX_ROWS))
    drafter = settings.drafter.model_copy(update={"kv_slots": slots})
    return settings.model_copy(update={"drafter": drafter})


def read_sets(
    tokenizer: Tokenizer, files: Sequence[Path], count: int, longest: int
) -> dict[str, list[list[int]]]:
    """Token ids of the first `count` prompts of each file that have at most `longest` tokens, by
    the file's name. Raises StartError where there are none, or two files share a name."""
    sets: dict[str, list[list[int]]] = {}
    for file in files:
        encoded = map(tokenizer.encode_chat, read_prompts(file))
        prompts = list(islice((each for each in encoded if len(each) <= longest), count))
        if not prompts:
            raise StartError(f"prompts {file}: none that the model's context has room for")
        if file.stem in sets:
            raise StartError(f"two files of prompts are called {file.stem}: rename one")
        sets[file.stem] = prompts
    return sets


def answers(
    model: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    options: EvaluateOptions,
) -> list[Sample]:
    """The target's plain ones, with the features that the drafter reads; what has nothing to draft
    is left out."""
    longest = max(map(len, prompts)) + options.tokens
    generator = Generator(model, min(len(prompts), SESSIONS), longest, drafter.features.layers)
    asked = questions(prompts, (temperature,), options.seed, 0, options.tokens)
    return [sample for sample in generator.answer(asked) if sample.answer_rows > 0]


def mixed(sets: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The first SHAPE_ANSWERS of all sets in turn, cut to SHAPE_TOKENS."""
    turns = chain.from_iterable(zip_longest(*sets))
    chosen = islice((sample for sample in turns if sample is not None), SHAPE_ANSWERS)
    cut: list[Sample] = []
    for sample in chosen:
        length = sample.prompt_length + SHAPE_TOKENS
        cut.append(
            Sample(
                sample.tokens[:length],
                sample.prompt_length,
                sample.temperature,
                sample.features[: length - 1],
            )
        )
    return cut


def best_shape(settings: Settings, model: Decoder, samples: Sequence[Sample]) -> BestShape | None:
    """Over all depths, widths and sizes that `shapes` knows, of the drafter without n-grams."""
    if settings.speculation.drafter == "ngram" or not samples:
        return None
    speculation = settings.speculation.model_copy(update={"ngram": False})
    policy = WholeTrees()
    drafter = build_drafter(settings.model_copy(update={"speculation": speculation}), policy)
    drafts: dict[int, list[float]] = {}
    lengths: dict[int, list[Lengths]] = {}
    for width in range(1, WIDTH + 1):
        policy.children = width
        drafts[width] = draft_seconds(drafter, max(samples, key=lambda each: each.answer_rows))
        lengths[width] = lengths_everywhere(drafter, samples)
    costs = Costs(step_seconds(model), drafts)
    plain, *rated = rate(lengths, costs)
    return BestShape(plain, max(rated, key=lambda each: each.tokens_per_second), costs)
