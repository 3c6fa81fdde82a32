"""Metrics as a scraper sees them, and what a query asks of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import requests

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class Selector(NamedTuple):
    """What a query reads: `name{label op "value", …}`."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def matches(self, sample: Sample) -> bool:
        return sample.name == self.name and all(_holds(sample.labels.get(key), *rest) for key, *rest in self.matchers)


class Scrape:
    """One look at /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [
            Sample(name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in _SAMPLE.findall(text)
        ]

    @classmethod
    def of(cls, url: str) -> Scrape:
        return cls(requests.get(url, timeout=10).text)

    def get(self, name: str, **labels: str) -> float:
        """The one sample with these labels, whatever others it has."""
        (sample,) = self.find(name, **labels)
        return sample.value

    def find(self, name: str, **labels: str) -> list[Sample]:
        return [each for each in self.samples if each.name == name and labels.items() <= each.labels.items()]


def wait_metrics(url: str, condition: Callable[[Scrape], bool], timeout: float = 20) -> Scrape:
    """Metrics follow within a second or two."""
    deadline = time.monotonic() + timeout
    while not condition(scrape := Scrape.of(url)):
        assert time.monotonic() < deadline, scrape.text
        time.sleep(0.1)
    return scrape


def selectors(query: str) -> Iterator[Selector]:
    for name, matchers in _SELECTOR.findall(query):
        yield Selector(name, tuple(_MATCHER.findall(matchers)))


def _holds(value: str | None, operator: str, wanted: str) -> bool:
    is_equal = value is not None and (value == wanted if len(operator) == 1 or operator == "!=" else False)
    if operator.endswith("~"):
        is_equal = value is not None and re.fullmatch(wanted, value) is not None
    return is_equal != operator.startswith("!")
