"""Between the messages of `verifier.proto` and the drafter's own values."""

import torch

from coppice.errors import FailedPrecondition
from coppice.tree import DraftTree
from drafter_svc.drafter import Drafter, DraftTimes, FeatureRows, Features
from drafter_svc.session import Update
from protos import verifier_pb2 as pb

PROTOCOL_VERSION = 1
DTYPES = (("float32", torch.float32), ("bfloat16", torch.bfloat16))


def hello(drafter: Drafter, drafter_id: str, target_hash: str = "") -> pb.Hello:
    return pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        drafter_id=drafter_id,
        head=drafter.identity,
        features=_kind(drafter.features),
        hidden_size=drafter.hidden_size,
        vocab_size=drafter.vocab_size,
        target_hash=target_hash,
        feature_layers=drafter.features.layers,
    )


def _kind(features: Features) -> pb.FeatureKind.ValueType:
    if features.layers:
        return pb.FEATURE_KIND_EAGLE3
    return pb.FEATURE_KIND_FINAL if features.final else pb.FEATURE_KIND_NONE


def feature_width(mine: pb.Hello) -> int:
    """Values of one position's features; 0: none are read."""
    if mine.features == pb.FEATURE_KIND_EAGLE3:
        return mine.hidden_size * len(mine.feature_layers)
    return mine.hidden_size if mine.features == pb.FEATURE_KIND_FINAL else 0


def check_welcome(mine: pb.Hello, welcome: pb.Welcome) -> None:
    """Raises FailedPrecondition that names both sides of a misfit."""
    pairs = (
        ("protocol version", mine.protocol_version, welcome.protocol_version),
        ("hidden size", mine.hidden_size, welcome.model.hidden_size),
        ("vocabulary", mine.vocab_size, welcome.model.vocab_size),
    )
    for what, own, theirs in pairs:
        if own not in (0, theirs):
            raise FailedPrecondition(
                f"head {mine.head} and target {welcome.model.model} do not fit: "
                f"{what} {own} against {theirs}"
            )


def update(message: pb.Committed, width: int) -> Update:
    """Features of `width` values; absent or malformed ones have to be pulled."""
    features = None
    if message.features and width:
        try:
            rows = feature_rows(message.features, message.feature_dtype, width)
            features = FeatureRows(message.features_from, rows)
        except ValueError:
            features = None
    return Update(
        epoch=message.epoch,
        start=message.start,
        base_length=message.base_length,
        tokens=list(message.tokens),
        budget=message.node_budget,
        features=features,
    )


def feature_rows(data: bytes, dtype: str, width: int) -> torch.Tensor:
    """Rows [positions, width]. Raises ValueError for an unknown dtype or a broken row."""
    kind = dict(DTYPES).get(dtype)
    if kind is None:
        raise ValueError(f"features of {dtype!r}: expected {' or '.join(n for n, _ in DTYPES)}")
    row_bytes = width * kind.itemsize
    if not data or len(data) % row_bytes:
        raise ValueError(f"{len(data)} bytes of features: expected rows of {row_bytes}")
    return torch.frombuffer(bytearray(data), dtype=kind).view(-1, width)


def join(session_id: str, epoch: int) -> pb.DraftItem:
    return pb.DraftItem(join=pb.Join(session_id=session_id, epoch=epoch))


def leave(session_id: str, epoch: int) -> pb.DraftItem:
    return pb.DraftItem(leave=pb.Leave(session_id=session_id, epoch=epoch))


def tree(
    session_id: str, epoch: int, base_length: int, draft_id: int, drafted: DraftTree
) -> pb.DraftItem:
    return pb.DraftItem(
        tree=pb.Tree(
            session_id=session_id,
            epoch=epoch,
            base_length=base_length,
            draft_id=draft_id,
            tokens=drafted.tokens,
            parents=drafted.parents,
            scores=drafted.scores,
        )
    )


def nothing(session_id: str, epoch: int, base_length: int) -> pb.DraftItem:
    item = pb.DraftItem()
    passed = pb.Pass(session_id=session_id, epoch=epoch, base_length=base_length)
    getattr(item, "pass").CopyFrom(passed)  # the field's name is a keyword
    return item


def latency(times: DraftTimes) -> pb.DraftItem:
    return pb.DraftItem(
        latency=pb.Latency(
            catch_up_seconds=times.catch_up_seconds, seconds_per_depth=times.seconds_per_depth
        )
    )
