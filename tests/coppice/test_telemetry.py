"""Metrics of several processes on one page, and logs as JSON lines."""

import json
import logging

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from coppice.telemetry import JsonFormatter, exposition, merge_expositions


def page(value: float, kind: type = Gauge) -> str:
    registry = CollectorRegistry()
    kind("depth", "Depth", registry=registry)
    gauge = Gauge("slots", "Slots", ["state"], registry=registry)
    gauge.labels("free").set(value)
    return exposition(registry)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    by_series = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in found}
    assert len(by_series) == len(found), "a series stands there twice"
    return by_series


@given(values=st.dictionaries(st.text("abc", min_size=1), st.integers(0, 99), max_size=5))
def test_every_worker_keeps_its_values(values):
    merged = samples(merge_expositions({name: page(value) for name, value in values.items()}))
    for name, value in values.items():
        assert merged["slots", (("state", "free"), ("worker", name))] == value


def test_each_metric_is_described_once():
    merged = merge_expositions({"": page(1), "a": page(2), "b": page(3)})
    assert merged.count("# TYPE slots gauge") == 1
    assert merged.count("# HELP slots Slots") == 1


def test_a_worker_that_names_itself_is_not_overruled():
    text = '# TYPE depth gauge\ndepth{worker="own"} 2\n'
    assert samples(merge_expositions({"other": text}))["depth", (("worker", "own"),)] == 2


def test_a_metric_of_another_type_is_left_out():
    merged = merge_expositions({"a": page(1, Gauge), "b": page(1, Counter)})
    assert merged.count("# TYPE depth ") == 1


def test_histograms_and_counters_survive_the_merge():
    registry = CollectorRegistry()
    Histogram("wait_seconds", "Wait", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    Counter("runs", "Runs", registry=registry).inc(3)
    merged = samples(merge_expositions({"w": exposition(registry)}))
    assert merged["wait_seconds_bucket", (("le", "1.0"), ("worker", "w"))] == 0
    assert merged["wait_seconds_bucket", (("le", "2.0"), ("worker", "w"))] == 1
    assert merged["runs_total", (("worker", "w"),)] == 3


def formatted(record: logging.LogRecord) -> dict[str, object]:
    line = JsonFormatter("gateway").format(record)
    assert "\n" not in line
    return json.loads(line)


def test_a_log_line_is_one_json_object_with_its_extra_fields():
    record = logging.makeLogRecord(
        {"name": "gateway.router", "levelname": "WARNING", "msg": "lost %s", "args": ("v0",)}
    )
    record.session = "abc"
    line = formatted(record)
    assert (line["service"], line["level"], line["message"]) == ("gateway", "warning", "lost v0")
    assert line["session"] == "abc"


def test_a_logged_exception_stays_on_its_line():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.makeLogRecord({"exc_info": (ValueError, error, error.__traceback__)})
    assert "two\nlines" in str(formatted(record)["exception"])
