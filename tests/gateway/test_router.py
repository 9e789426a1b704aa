"""Who gets a session, and who can be reached."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.errors import StartError, Unavailable
from gateway.router import DrafterLink, Router, VerifierLink
from protos import common_pb2, inference_pb2


class Named:
    """A worker that is never called."""

    def __init__(self, name):
        self.name = name


def reachable(router):
    links = [VerifierLink(Named(f"v{index}")) for index in range(4)]
    router._verifiers[:] = links
    for link in links:
        link.reachable = True
    return links


@given(loads=st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_of_two_verifiers_the_less_loaded_is_taken(loads):
    router = Router([], [])
    pair = reachable(router)[:2]
    router._verifiers[:] = pair
    for link, load in zip(pair, loads, strict=True):
        link.inflight = load
    assert router.pick_verifier().inflight == min(loads)


@given(excluded=st.sets(st.sampled_from(["v0", "v1", "v2", "v3"])))
def test_an_excluded_verifier_is_never_taken(excluded):
    router = Router([], [])
    reachable(router)
    if len(excluded) == 4:
        with pytest.raises(Unavailable):
            router.pick_verifier(excluded)
    else:
        assert router.pick_verifier(excluded).name not in excluded


@given(sessions=st.integers(1, 30))
def test_drafters_get_equally_many_sessions(sessions):
    router = Router([], [Named(f"d{index}") for index in range(3)])
    links: list[DrafterLink] = []
    for _ in range(sessions):
        link = router.pick_drafter()
        link.attached += 1
        links.append(link)
    loads = [link.attached for link in set(links)] + [0] * (3 - len(set(links)))
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == sessions


def test_a_drafter_to_avoid_is_taken_only_where_it_is_the_only_one():
    router = Router([], [Named("d0"), Named("d1")])
    first = router.pick_drafter()
    other = router.pick_drafter(avoid=first)
    other.attached += 5
    assert router.pick_drafter(avoid=first) is other
    alone = Router([], [Named("d0")])
    only = alone.pick_drafter()
    assert alone.pick_drafter(avoid=only) is only


async def test_no_verifier_at_start_is_one_line_with_their_names(build):
    class Dead(Named):
        async def ready(self):
            raise Unavailable("dead")

    router = Router([Dead("v7")], [])
    with pytest.raises(StartError, match=r"^no verifier answered within 0.2 s \(v7\); see"):
        await router.start(0.2)
    await router.close()


async def test_a_verifier_that_restarts_at_another_address_is_used_again(house):
    old_address = house.verifier.address
    await house.verifier.die()
    await asyncio.wait_for(house.router.away.wait(), 5.0)
    await house.verifier.start()
    assert house.verifier.address != old_address
    await asyncio.wait_for(house.router.ready.wait(), 5.0)
    house.verifier.answers("back")
    request = inference_pb2.GenerateRequest(text="hi")
    pieces = [piece async for piece in house.stub.Generate(request)]
    assert pieces[0].text == "back"
    assert pieces[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
