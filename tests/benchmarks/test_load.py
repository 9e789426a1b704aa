"""Load: what is counted of a window, and what cannot be asked for."""

import asyncio
import itertools
import statistics
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from benchmarks.closed_loop import (
    Agreement,
    Heard,
    Piece,
    Request,
    Tally,
    Window,
    closed_loop,
    endless,
    percentile_ms,
)
from benchmarks.load import LoadOptions, variants
from benchmarks.serving import sums
from benchmarks.soak import STRETCHES, WARM_UP, Usage, growth
from coppice.errors import StartError
from coppice.settings import Settings
from protos import common_pb2
from verifier_svc.guard import Guard

PREFILL, PLAIN, SPECULATIVE, GUARDED = (
    common_pb2.DECODING_MODE_PREFILL,
    common_pb2.DECODING_MODE_PLAIN,
    common_pb2.DECODING_MODE_SPECULATIVE,
    common_pb2.DECODING_MODE_GUARDED,
)
REQUEST = Request(0, (1, 2), 0.0, 8)


def heard(asked: float, *pieces: tuple[float, int, int], request: Request = REQUEST) -> Heard:
    """Pieces as (time, tokens, mode)."""
    return Heard(
        request,
        asked,
        [time for time, _, _ in pieces],
        [Piece([7] * tokens, mode) for _, tokens, mode in pieces],
    )


@pytest.mark.parametrize("count", [2, 3, 10, 101])
def test_percentiles_are_those_of_the_standard_library(count: int) -> None:
    values = [((37 * n) % count) ** 1.5 for n in range(count)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 99):
        assert percentile_ms(values, percent) == pytest.approx(1e3 * cuts[percent - 1])


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile_ms([], 50) is None


def test_only_what_arrives_within_the_window_counts_and_a_step_is_shared_by_its_tokens() -> None:
    before = heard(0.0, (1.0, 1, PREFILL), (11.0, 4, SPECULATIVE), (11.5, 1, PLAIN))
    within = heard(12.0, (12.25, 1, PREFILL), (13.25, 2, SPECULATIVE), (14.25, 1, GUARDED))
    after = heard(14.0, (20.5, 1, PREFILL))
    tally = Tally()
    tally.add(Window([before, within, after], 10.0, 20.0, None, None))
    assert tally.tokens == 4 + 1 + 1 + 2 + 1
    assert tally.tokens_per_second == 0.9
    assert tally.ttft == [0.25]
    assert tally.itl == [2.5] * 4 + [0.5] + [0.5] * 2 + [1.0]
    assert tally.acceptance_length == 3.0
    assert tally.guarded_share == 0.25


def test_windows_are_pooled() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(Window([heard(0.0, (1.0, 1, PREFILL), (2.0, 3, PLAIN))], 0.5, 2.5, None, None))
    assert tally.seconds == 6.0
    assert tally.tokens_per_second == 2.0
    assert tally.acceptance_length is None


def test_answers_are_compared_as_far_as_both_go() -> None:
    agreement = Agreement()
    other = Request(1, (1,), 0.0, 8)
    agreement.add(heard(0.0, (1.0, 2, PLAIN)))
    agreement.add(heard(0.0, (1.0, 5, PLAIN)))
    agreement.add(heard(0.0, (1.0, 3, PLAIN), request=other))
    assert (agreement.compared, agreement.differing) == (2, 0)
    wrong = Heard(REQUEST, 0.0, [1.0], [Piece([7, 7, 8, 7, 9, 9])])
    agreement.add(wrong)
    assert (agreement.compared, agreement.differing) == (2 + 5, 2)


def test_sets_take_turns_and_every_prompt_is_asked_greedily_and_sampled() -> None:
    request = endless([[[1], [2], [3]], [[10], [20]]], tokens=5)
    asked = [request(number) for number in range(24)]
    assert [each.prompt[0] >= 10 for each in asked] == [False, True] * 12
    assert {(each.prompt[0], each.temperature) for each in asked} == set(
        itertools.product((1, 2, 3, 10, 20), (0.0, 0.8))
    )
    assert request(7) == request(7)
    assert len({each.number for each in asked}) == 24


@pytest.mark.parametrize(("clients", "answers"), [(5, 5), (5, 12), (1, 3)])
async def test_the_window_holds_the_first_answers_whole_and_nothing_runs_after_it(
    clients: int, answers: int
) -> None:
    running, most, ended = 0, 0, 0

    async def ask(request: Request) -> AsyncGenerator[Piece, None]:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        try:
            for token in range(request.tokens):
                await asyncio.sleep(0)
                yield Piece([token])
            ended += 1
        finally:
            running -= 1

    async def probe() -> int:
        return ended

    # Every third takes longer, so that they do not end in the order they began in.
    requests = (Request(n, (1,), 0.0, 9 if n % 3 == 0 else 2) for n in itertools.count())
    window = await closed_loop(ask, requests, clients, answers, probe)
    assert (most, running) == (clients, 0)
    assert window.before == 0
    assert window.after >= answers
    assert [each.request.number for each in window.heard] == list(range(len(window.heard)))
    assert len(window.heard) >= window.after + clients
    for each in window.heard[:answers]:
        assert each.tokens == list(range(each.request.tokens))
        assert window.start < each.times[-1] <= window.end


async def test_what_a_request_raises_ends_the_load() -> None:
    async def ask(request: Request) -> AsyncGenerator[Piece, None]:
        yield Piece([1])
        await asyncio.sleep(0)
        if request.number == 3:
            raise ValueError("refused")

    async def probe() -> None: ...

    requests = (Request(number, (1,), 0.0, 3) for number in itertools.count())
    with pytest.raises(ValueError, match="refused"):
        await closed_loop(ask, requests, 2, 1000, probe)


def parsed(**changed: object) -> LoadOptions:
    given = {"concurrency": "1,8", "modes": "auto,off,on", "vllm": None}
    return LoadOptions.parsed(
        **{**given, **changed}, rounds=1, answers=1, tokens=8, prompts=[Path("x.jsonl")]
    )


def test_lists_are_read_in_any_order() -> None:
    options = parsed(concurrency="32, 1,8,1", modes="off,auto")
    assert list(options.concurrency) == [1, 8, 32]
    assert list(options.modes) == ["auto", "off"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"concurrency": "1,,2"}, "--concurrency 1,,2"),
        ({"concurrency": "0"}, "--concurrency 0"),
        ({"concurrency": "many"}, "--concurrency many"),
        ({"modes": "auto,fast"}, "--modes auto,fast"),
        ({"modes": ""}, "--modes "),
        ({"vllm": Path("/nowhere/python")}, "--vllm /nowhere/python"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(
    changed: dict[str, object], complaint: str
) -> None:
    with pytest.raises(StartError, match=complaint):
        parsed(**changed)


def test_on_is_a_service_of_its_own_without_a_guard_and_off_is_none() -> None:
    settings = Settings()
    both = variants(settings, ["auto", "on", "off"], slots=100_000)
    assert set(both) == {"auto", "on"}
    assert set(variants(settings, ["off"], slots=1)) == {"auto"}
    assert both["auto"].speculation == settings.speculation
    assert both["auto"].guard == settings.guard
    assert both["on"].speculation.budget == "fixed"
    assert not Guard(both["on"].guard).update(10_000, 0.0)
    for each in both.values():
        assert each.verifier.kv_slots >= 100_000
        assert each.drafter.kv_slots >= 100_000
        assert not each.verifier.prefix_cache


def test_series_are_summed_over_their_labels() -> None:
    page = '# TYPE a gauge\na{x="1"} 2\na{x="2"} 3.5\n# TYPE b counter\nb_total 4\n'
    assert sums(page) == {"a": 5.5, "b_total": 4.0}


MB = 1 << 20


def rests(before: dict[str, Usage], after: dict[str, Usage]) -> list[dict[str, Usage]]:
    """Whatever happened while warming up, it was `before` then."""
    return [{}] * (WARM_UP - 1) + [before] * (STRETCHES - WARM_UP) + [after]


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        (Usage(1, 40, 500 * MB), None),
        (Usage(1, 43, 520 * MB), None),
        (Usage(1, 50, 500 * MB), "gateway: 40 open files became 50"),
        (Usage(1, 40, 600 * MB), "gateway: 500 MB became 600 MB"),
        (Usage(2, 40, 500 * MB), "gateway: 1 processes became 2"),
    ],
)
def test_what_grows_after_the_warm_up_is_named(after: Usage, complaint: str | None) -> None:
    found = growth(rests({"gateway": Usage(1, 40, 500 * MB)}, {"gateway": after}), memory=True)
    assert found == ([] if complaint is None else [complaint])


def test_a_process_that_is_gone_is_named_and_a_short_run_says_nothing_about_memory() -> None:
    before = {"a": Usage(1, 9, 10 * MB), "b": Usage(1, 9, 10 * MB)}
    assert growth(rests(before, {"a": Usage(1, 9, 900 * MB)}), memory=False) == ["b: gone"]
