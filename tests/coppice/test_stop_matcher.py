"""Stop strings in a stream, however it is split."""

from hypothesis import given
from hypothesis import strategies as st

from coppice.tokenizer import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
PARTS = st.lists(st.text("abc", max_size=4), max_size=8)


def searched(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The whole text, looked at after every character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(parts=PARTS, stops=STOPS)
def test_any_split_gives_what_a_search_of_the_whole_text_gives(
    parts: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(part) for part in parts) + matcher.flush()
    assert (shown, matcher.matched) == searched("".join(parts), stops)


@given(parts=PARTS, stops=STOPS)
def test_what_is_held_back_may_still_become_a_stop_string(
    parts: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for part in parts:
        text += part
        shown += matcher.push(part)
        if matcher.matched is None:
            held = text[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_a_match_is_known_as_soon_as_it_is_complete() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(part) for part in ("xE", "N", "D and more", "!")] == ["x", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("text") == "text"
    assert matcher.flush() == ""
