"""A head learns a domain: on a synthetic log, with a tiny target."""

import json
import random
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from coppice.errors import StartError
from coppice.models.loading import load_target
from coppice.settings import Settings
from coppice.tokenizer import Tokenizer
from kernels.batch import AttentionBatch, Segment
from launcher.cli import app
from training.adapt import AdaptOptions, adapt
from training.dataset import Dataset
from training.domain import Piece, Teacher, read_domain
from training.fit import FitOptions, draft_vocabulary, fit
from training.prepare import PrepareOptions, prepare
from training.run import Rhythm

QUIET = Console(quiet=True)
CPU = torch.device("cpu")
GENERAL, JARGON = range(28), range(28, 57)  # words of everyday and of the log


def log_lines(count: int) -> str:
    """Lines of one shape: a few fields vary, from few values."""
    draw = random.Random(1)
    fields = [JARGON[:3], JARGON[3:9], JARGON[9:11], JARGON[11:20], JARGON[20:]]
    lines = (" ".join(f"w{draw.choice(field)}" for field in fields) for _ in range(count))
    return "\n".join(lines) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "service.log"
    path.write_text(log_lines(400))
    return path


@pytest.fixture(scope="module")
def general(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers to everyday prompts."""
    folder = tmp_path_factory.mktemp("general")
    draw = random.Random(2)
    lines = [" ".join(f"w{draw.choice(GENERAL)}" for _ in range(4)) for _ in range(60)]
    (folder / "prompts.txt").write_text("\n".join(lines))
    options = PrepareOptions(
        [folder / "prompts.txt"], [], folder / "data", 60, (0.0,), 12, 12, 32, True, 0
    )
    return prepare(settings_for(target), options, QUIET).path


def fitted(target: Path, general: Path, kind: str, vocabulary: int) -> Path:
    """A head that has learnt from everyday alone, and can draft its commonest words."""
    options = FitOptions(
        kind=kind,
        data=(general,),
        init=None,
        epochs=6,
        batch_tokens=128,
        learning_rate=1e-2,
        steps=2,
        layers=1,
        feature_weight=0.1,
        noise=0.0,
        vocabulary=vocabulary,
        held_out=4,
        seed=0,
    )
    output = general.parent / kind
    fit(settings_for(target), options, output, QUIET, Rhythm())
    return output


@pytest.fixture(scope="module")
def head(target: Path, general: Path) -> Path:
    return fitted(target, general, "eagle", 24)


def settings_for(target: Path) -> Settings:
    return Settings.model_validate({"model": {"path": str(target)}, "verifier": {"threads": 1}})


@pytest.fixture
def options(head: Path, log: Path, general: Path) -> AdaptOptions:
    return AdaptOptions(
        head=head,
        text=(log,),
        prompts=(),
        data=(general,),
        count=80,
        window=16,
        general_share=0.25,
        held_out=8,
        epochs=6,
        batch_tokens=128,
        learning_rate=1e-2,
        seed=0,
    )


def test_acceptance_on_the_domain_rises(
    settings: Settings, options: AdaptOptions, head: Path, tmp_path: Path
) -> None:
    adaptation = adapt(settings, options, tmp_path / "adapted", QUIET)
    assert adaptation.after.domain > 1.1 * adaptation.before.domain
    assert adaptation.before.general is not None
    assert adaptation.share(adaptation.after) == pytest.approx(
        adaptation.after.domain / adaptation.before.general
    )
    known, more = (set(draft_vocabulary(d, 60).tolist()) for d in (head, tmp_path / "adapted"))
    assert known < more
    # What it learnt from: 80 pieces, and a third as many general samples.
    assert Dataset.open(tmp_path / "adapted" / "domain").size()[0] == 80
    assert Dataset.open(tmp_path / "adapted" / "general").size()[0] == 27
    assert "coppice train adapt" in (tmp_path / "adapted" / "README.md").read_text()


def test_an_eagle3_head_keeps_its_vocabulary(
    settings: Settings, options: AdaptOptions, target: Path, general: Path, tmp_path: Path
) -> None:
    head, output = fitted(target, general, "eagle3", 50), tmp_path / "adapted"
    changed = {"head": head, "count": 60}
    adaptation = adapt(settings, options.model_copy(update=changed), output, QUIET)
    assert adaptation.after.domain > adaptation.before.domain
    assert draft_vocabulary(output, 60).tolist() == draft_vocabulary(head, 60).tolist()


def test_features_of_text_are_those_of_reading_it_alone(target: Path) -> None:
    model = load_target(target, torch.float32, CPU)
    draw = random.Random(3)
    texts = [[draw.randrange(60) for _ in range(length)] for length in (16, 9, 16, 11)]
    teacher = Teacher(model, 16, ())
    samples = teacher.lessons([Piece(tokens, True) for tokens in texts], 0, 0)
    for tokens, sample in zip(texts, samples, strict=True):
        rows = torch.arange(len(tokens) - 1)
        alone = AttentionBatch(rows, rows, (Segment(len(rows), rows[:0], rows, None),))
        expected = model.forward(torch.tensor(tokens[:-1]), model.new_cache(16), alone)
        assert sample.tokens.tolist() == tokens
        assert sample.prompt_length == 1
        assert torch.equal(sample.features, expected.bfloat16())


def test_exams_are_what_the_target_says(target: Path) -> None:
    model = load_target(target, torch.float32, CPU)
    text, prompt = [5, 9, 13, 17, 21, 25, 29, 33], [7, 8, 9]
    exams = Teacher(model, 8, ()).exams([Piece(text, True), Piece(prompt, False)])
    for sample, given in zip(exams, (text[:4], prompt), strict=True):
        tokens = list(given)
        while len(tokens) < len(sample.tokens):
            rows = torch.arange(len(tokens))
            whole = AttentionBatch(rows, rows, (Segment(len(rows), rows[:0], rows, None),))
            hidden = model.forward(torch.tensor(tokens), model.new_cache(16), whole)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        assert sample.tokens.tolist() == tokens
        assert sample.prompt_length == len(given)
        assert len(sample.tokens) - len(given) <= 4


def test_pieces_are_windows_of_whole_lines_and_chats(
    target: Path, log: Path, prompts: Path
) -> None:
    tokenizer = Tokenizer.load(target)
    pieces = read_domain(tokenizer, [log], [prompts], 16, 10_000, 0)
    assert sorted(map(str, pieces)) == sorted(
        map(str, read_domain(tokenizer, [log], [prompts], 16, 10_000, 1))
    )
    starts = {f"w{word}" for word in JARGON[:3]}
    texts = [piece for piece in pieces if piece.is_text]
    assert all(8 <= len(piece.tokens) <= 16 for piece in texts)
    assert tokenizer.token_text(texts[0].tokens[0]) in starts
    chats = [piece for piece in pieces if not piece.is_text]
    asked = {json.loads(line)["prompt"] for line in prompts.read_text().splitlines()}
    assert len(chats) == len(asked)
    assert read_domain(tokenizer, [log], [prompts], 16, 10, 0) == pieces[:10]


def test_misfits_are_refused(settings: Settings, options: AdaptOptions, tmp_path: Path) -> None:
    few = options.model_copy(update={"held_out": 400})
    with pytest.raises(StartError, match="too few to learn from"):
        adapt(settings, few, tmp_path / "out", QUIET)
    with pytest.raises(StartError, match="other options"):
        adapt(settings, options, tmp_path / "out", QUIET)
    missing = options.model_copy(update={"text": (tmp_path / "none.log",)})
    with pytest.raises(StartError, match=r"none\.log cannot be read"):
        adapt(settings, missing, tmp_path / "other", QUIET)


def test_the_command_prints_before_and_after(
    target: Path, head: Path, log: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(target), "--head", str(head), "--text", str(log)]
    sizes = ["--count", "24", "--window", "16", "--held-out", "4", "--epochs", "1"]
    output = ["--output", str(tmp_path / "adapted"), "--verifier-threads", "1"]
    result = CliRunner().invoke(app, ["train", "adapt", *arguments, *sizes, *output])
    assert result.exit_code == 0, result.output
    assert "before" in result.output
    assert "after" in result.output
