"""Who gets a session, and who can be reached."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.errors import StartError, Unavailable
from gateway.links import DrafterLink, VerifierLink
from gateway.prefixes import BLOCK_TOKENS, PrefixMemory
from gateway.router import PREFIX_LEAD, Router
from protos import common_pb2, inference_pb2


class Named:
    """A worker that is never called."""

    def __init__(self, name):
        self.name = name


def reachable(router):
    links = [VerifierLink(Named(f"v{index}")) for index in range(4)]
    router.verifiers[:] = links
    for link in links:
        link.reachable = True
    return links


@given(loads=st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_of_two_verifiers_the_less_loaded_is_taken(loads):
    router = Router([], [])
    pair = reachable(router)[:2]
    router.verifiers[:] = pair
    for link, load in zip(pair, loads, strict=True):
        link.load.own = load
    assert router.pick_verifier().load.total == min(loads)


@given(excluded=st.sets(st.sampled_from(["v0", "v1", "v2", "v3"])))
def test_an_excluded_verifier_is_never_taken(excluded):
    router = Router([], [])
    reachable(router)
    if len(excluded) == 4:
        with pytest.raises(Unavailable):
            router.pick_verifier(excluded=excluded)
    else:
        assert router.pick_verifier(excluded=excluded).name not in excluded


@given(sessions=st.integers(1, 30))
def test_drafters_get_equally_many_sessions(sessions):
    router = Router([], [Named(f"d{index}") for index in range(3)])
    links: list[DrafterLink] = []
    for _ in range(sessions):
        link = router.pick_drafter("t")
        link.load.own += 1
        links.append(link)
    loads = [link.load.total for link in set(links)] + [0] * (3 - len(set(links)))
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == sessions


def test_a_drafter_to_avoid_is_taken_only_where_it_is_the_only_one():
    router = Router([], [Named("d0"), Named("d1")])
    first = router.pick_drafter("t")
    other = router.pick_drafter("t", avoid=first)
    other.load.own += 5
    assert router.pick_drafter("t", avoid=first) is other
    alone = Router([], [Named("d0")])
    only = alone.pick_drafter("t")
    assert alone.pick_drafter("t", avoid=only) is only


def test_a_drafter_of_another_target_is_never_taken():
    router = Router([], [Named("d0"), Named("d1"), Named("d2")])
    for link, target in zip(router.drafters, ("other", "t", ""), strict=True):
        link.target_hash = target
    router.drafters[1].load.own = 3
    assert router.pick_drafter("t").worker.name == "d2"
    router.drafters[2].load.own = 9
    assert router.pick_drafter("t").worker.name == "d1"
    assert Router([], []).pick_drafter("t") is None


def test_a_session_goes_where_the_longest_beginning_of_it_was_computed():
    router = Router([], [])
    links = reachable(router)
    for index, link in enumerate(links):
        link.address = f"host:{index}"
    prompt = list(range(200))
    router.remember(links[1], prompt[:64])
    router.remember(links[2], prompt[:150])
    router.remember(links[3], [7, *prompt])  # the same tokens, but not from the first on
    for _ in range(20):
        assert router.pick_verifier(prompt) is links[2]
        assert router.pick_verifier([*prompt[:100], *prompt]) is links[2]
        assert router.pick_verifier(prompt, excluded={"v2"}) is links[1]
        assert router.pick_verifier([*prompt[:64], 0, *prompt]) in links[1:3]


def test_a_cached_beginning_does_not_draw_all_load_to_one_verifier():
    router = Router([], [])
    links = reachable(router)[:2]
    router.verifiers[:] = links
    links[0].address, links[1].address = "host:0", "host:1"
    router.remember(links[0], range(64))
    links[0].load.own = PREFIX_LEAD
    assert router.pick_verifier(range(64)) is links[0]
    links[0].load.own += 1
    assert router.pick_verifier(range(64)) is links[1]


def test_a_beginning_shorter_than_a_block_counts_for_nothing():
    router = Router([], [])
    links = reachable(router)
    for index, link in enumerate(links):
        link.address, link.load.own = f"host:{index}", index
    router.remember(links[3], range(31))
    assert {router.pick_verifier(range(31)) for _ in range(40)} == set(links[:3])


@given(
    kinds=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=4, max_size=4)
)
def test_equal_bits_go_before_staying_and_staying_before_heartbeats(kinds):
    router = Router([], [])
    links = reachable(router)
    for link, (equal, staying, beats) in zip(links, kinds, strict=True):
        link.info = common_pb2.ModelInfo(numerics_fingerprint="a" if equal else "b")
        link.draining, link.registered = not staying, beats
    picked = router.pick_verifier(fingerprint="a")
    assert kinds[links.index(picked)] == max(kinds)


@given(
    sent=st.lists(st.tuples(st.sampled_from("xyz"), st.lists(st.integers(0, 1), max_size=6))),
    asked=st.lists(st.integers(0, 1), max_size=6),
)
def test_prefixes_are_found_as_by_comparing_all_that_was_sent(sent, asked):
    memory = PrefixMemory()
    spread = [[bit] * BLOCK_TOKENS for bit in (0, 1)]  # a bit is a block
    for address, bits in sent:
        memory.remember(address, [token for bit in bits for token in spread[bit]])

    def common(bits):
        return next((i for i, (a, b) in enumerate(zip(bits, asked, strict=False)) if a != b),
                    min(len(bits), len(asked)))  # fmt: skip

    best = max((common(bits) for _, bits in sent), default=0)
    wanted = {address for address, bits in sent if common(bits) == best} if best else set()
    tokens = [token for bit in asked for token in spread[bit]]
    assert memory.longest("xyz", tokens) == wanted


def test_the_oldest_prefixes_are_forgotten():
    memory = PrefixMemory(capacity=2)
    for start in (0, 100, 200):
        memory.remember("x", range(start, start + BLOCK_TOKENS))
    assert memory.longest("x", range(BLOCK_TOKENS)) == set()
    assert memory.longest("x", range(100, 100 + BLOCK_TOKENS)) == {"x"}


async def test_sessions_that_come_together_are_spread(build):
    house = await build(verifiers=2)
    for verifier in house.verifiers:
        verifier.registers()
    request = inference_pb2.GenerateRequest(text="hi", speculation=False)
    calls = [house.stub.Generate(request) for _ in range(6)]
    async with asyncio.timeout(5.0):
        while sum(len(verifier.requests) for verifier in house.verifiers) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [len(verifier.requests) for verifier in house.verifiers] == [3, 3]
    for call in calls:
        call.cancel()


async def test_a_verifier_of_another_target_is_not_used(build):
    house = await build(verifiers=2)
    stranger = house.verifiers[1]
    await house.router.drop_verifier(house.router.verifiers[1])
    stranger.info.target_hash = "other"
    link = house.router.add_verifier(stranger)
    async with asyncio.timeout(5.0):
        while not link.info.target_hash:  # noqa: ASYNC110 - it was asked once it is there
            await asyncio.sleep(0.01)
    assert not link.reachable
    assert house.router.reachable == 1


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
