"""The model card (README.md) of what `coppice train fit` made, from what it left in its directory.

A card names files, never where they lie on a machine.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from coppice.errors import StartError
from training.curve import CURVE_FILE
from training.dataset import Dataset, Description

CARD_FILE, DATA_FILE, EVALUATION_FILE = "README.md", "data.json", "evaluation.json"
OPTIONS_FILE, ADAPT_FILE = "options.json", "adapt.json"

TITLES = {
    "eagle": "EAGLE-2 draft head",
    "eagle3": "EAGLE-3 draft head",
    "medusa": "Medusa heads",
    "model": "Draft model",
}
FORMATS = {
    "eagle": "Published EAGLE-1/2 layout (arXiv 2401.15077 and 2406.16858), without `fc.bias`; "
    "embedding and LM head are the target's. `token_map.json`: the target's tokens that can be "
    "drafted.",
    "eagle3": "Published EAGLE-3 layout (arXiv 2503.01840), its draft vocabulary in `d2t` and "
    "`t2d`; the embedding is the target's.",
    "medusa": "Published Medusa layout (arXiv 2401.10774).",
    "model": "A causal language model of the target's own family and tokenizer.",
}
# SGLang's head of EAGLE-1/2 has a bias, whatever the file holds.
ELSEWHERE = {
    "eagle": (
        '`speculative_config={"method": "eagle", "model": DIR, "num_speculative_tokens": 3}`',
        "`--speculative-algorithm EAGLE --speculative-draft-model-path DIR`; in its config.json "
        '`architectures` must be `["LlamaForCausalLMEagle"]`, and `fc.bias` be stored as zeros',
    ),
    "eagle3": (
        '`speculative_config={"method": "eagle3", "model": DIR, "num_speculative_tokens": 3}`',
        "`--speculative-algorithm EAGLE3 --speculative-draft-model-path DIR`",
    ),
    "medusa": (
        '`speculative_config={"method": "medusa", "model": DIR, "num_speculative_tokens": 3}`',
        "not supported",
    ),
    "model": (
        '`speculative_config={"method": "draft_model", "model": DIR, "num_speculative_tokens": 3}`',
        "`--speculative-algorithm STANDALONE --speculative-draft-model-path DIR`",
    ),
}
OURS = {
    "eagle": "--head DIR",
    "eagle3": "--head DIR",
    "medusa": "--speculation-drafter medusa --head DIR",
    "model": "--speculation-drafter model --speculation-draft-model DIR",
}


class UsedData(BaseModel):
    """A dataset that was learnt from, as far as a card tells of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: Description
    answers: int
    tokens: int  # of the answers


_USED = TypeAdapter(list[UsedData])


def note_data(output: Path, datasets: Sequence[Dataset]) -> None:
    """Keeps in `output` what its card will tell of the data."""
    used: list[UsedData] = []
    for dataset in datasets:
        answers, tokens = dataset.size()
        used.append(
            UsedData(
                name=dataset.path.resolve().name,
                description=dataset.description,
                answers=answers,
                tokens=tokens,
            )
        )
    (output / DATA_FILE).write_bytes(_USED.dump_json(used, indent=1) + b"\n")


def write_card(output: Path) -> None:
    """Writes the README.md of the finished run in `output`, with the numbers of its evaluation if
    there is one. Raises StartError when no run is there."""
    check_run(output)
    options = json.loads((output / OPTIONS_FILE).read_text(encoding="utf-8"))
    used = _USED.validate_json((output / DATA_FILE).read_bytes())
    with (output / CURVE_FILE).open(newline="", encoding="utf-8") as file:
        curve = list(csv.DictReader(file))
    evaluation, adapted = (_read(output / name) for name in (EVALUATION_FILE, ADAPT_FILE))
    name = output.resolve().name
    target = Path(used[0].description.target).name
    if adapted is None:
        commands = [*map(_prepare, used), _command("fit", target, name, options)]
    else:
        commands = [_command("adapt", target, name, adapted)]
    card = _card(target, options, used, curve, evaluation, commands)
    (output / CARD_FILE).write_text(card, encoding="utf-8")


def _read(file: Path) -> Mapping[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def check_run(output: Path) -> None:
    """Raises StartError unless `output` has what a card tells of."""
    for name in (OPTIONS_FILE, DATA_FILE, CURVE_FILE):
        if not (output / name).exists():
            raise StartError(f"{output} holds no run of `coppice train fit`: {name} is missing")


def note_evaluation(output: Path, evaluation: Mapping[str, Any]) -> None:
    """Puts the numbers of an evaluation (`report.as_json`) into the card."""
    check_run(output)
    text = json.dumps(evaluation, indent=2) + "\n"
    (output / EVALUATION_FILE).write_text(text, encoding="utf-8")
    write_card(output)


def _card(
    target: str,
    options: Mapping[str, Any],
    used: Sequence[UsedData],
    curve: Sequence[Mapping[str, str]],
    evaluation: Mapping[str, Any] | None,
    commands: Sequence[str],
) -> str:
    kind = options["kind"]
    vllm, sglang = ELSEWHERE[kind]
    parts = [
        f"# {TITLES[kind]} for {target}",
        "It drafts; the target verifies every token and alone decides what is answered.",
        "## What it is",
        f"- Target: {target}, hash `{used[0].description.target_hash}`\n- {FORMATS[kind]}",
        "## Data",
        _data(used),
        "## Training",
        _training(options, curve),
        "## Measured",
        "Not evaluated yet." if evaluation is None else _measured(evaluation),
        "## Use",
        f"- Coppice: `coppice up --model TARGET {OURS[kind]}`\n- vLLM: {vllm}\n- SGLang: {sglang}",
        "## Make it again",
        "\n".join(("```sh", *commands, "```")),
    ]
    return "\n\n".join(parts) + "\n"


def _data(used: Sequence[UsedData]) -> str:
    head = (
        "Answers of the target itself; of a domain's text (`coppice train adapt`) the text.\n\n"
        "| dataset | prompts from | answers | tokens | temperatures | seed |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(
        f"| {data.name} | {', '.join(data.description.prompts)} | {data.answers:,} | "
        f"{data.tokens:,} | {_numbers(data.description.temperatures)} | {data.description.seed} |"
        for data in used
    )


def _training(options: Mapping[str, Any], curve: Sequence[Mapping[str, str]]) -> str:
    taught = [row for row in curve if row["tokens"]]
    judged = [row for row in curve if row["acceptance_length"]]
    done = "No step is in the learning curve."
    if taught:
        last = taught[-1]
        done = (
            f"{int(last['step']):,} steps over {float(last['epoch']):.1f} epochs, "
            f"{int(float(last['tokens'])):,} positions taught in {float(last['seconds']):,.0f} s; "
            f"loss {float(last['loss']):.3f}, agreement with the target's likeliest token "
            f"{float(last['agreement']):.3f}."
        )
    if judged:
        length = float(judged[-1]["acceptance_length"])
        done += f" Acceptance length on held-out samples of the data, 16 rows: {length:.3f}."
    rows = "\n".join(f"| {name} | {_shown(value)} |" for name, value in options.items())
    return f"{done}\n\n| setting | value |\n| --- | --- |\n{rows}"


def _measured(evaluation: Mapping[str, Any]) -> str:
    setting, lengths = evaluation["setting"], evaluation["acceptance_length"]
    columns = [
        (temperature, rows)
        for temperature, of_rows in next(iter(lengths.values())).items()
        for rows in of_rows
    ]
    heading = " | ".join(f"t {temperature}, {rows} rows" for temperature, rows in columns)
    body = "\n".join(
        f"| {name} | " + " | ".join(f"{found[t][rows]:.2f}" for t, rows in columns) + " |"
        for name, found in lengths.items()
    )
    made = (
        f"Acceptance length (tokens per verification, the new one included) with so many rows of a "
        f"tree, the root counted: the first {setting['prompts']} prompts of each set, answers of "
        f"{setting['tokens']} tokens at most, depth {setting['depth']}, top_k {setting['top_k']}, "
        f"{setting['dtype']}, `coppice train evaluate`."
    )
    return f"{made}\n\n| set | {heading} |\n|{' --- |' * (len(columns) + 1)}\n{body}"


def _prepare(data: UsedData) -> str:
    told = data.description
    words = [
        f"coppice train prepare --model {Path(told.target).name}",
        *(f"--prompts {file}" for file in told.prompts),
        *(f"--held-out {file}" for file in told.held_out),
        f"--output {data.name} --count {data.answers}",
        *(f"--temperature {temperature:g}" for temperature in told.temperatures),
        f"--max-prompt-tokens {told.max_prompt_tokens}",
        f"--max-answer-tokens {told.max_answer_tokens}",
        *(["--layers"] if told.feature_layers else []),
        f"--seed {told.seed}",
    ]
    return " ".join(words)


def _command(command: str, target: str, output: str, options: Mapping[str, Any]) -> str:
    words = [f"coppice train {command} --model {target}"]
    for option, value in options.items():
        values = value if isinstance(value, list) else [value]
        flag = f"--{option.replace('_', '-')}"
        words += [f"{flag} {_shown(each)}" for each in values if each is not None]
    return " ".join([*words, f"--output {output}"])


def _shown(value: object) -> str:
    """Of paths their names alone."""
    if isinstance(value, list):
        return ", ".join(_shown(each) for each in value)
    if isinstance(value, str):
        return Path(value).name
    return f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
