"""What has been found so far, in a JSON file that is whole at any moment, and the short table at the end."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGUN = "begun"  # an item that is not over: whoever finds it in another process knows that the first one died in it


class Report:
    """`{stage: {"state", "seconds", "items": {name: value or {"error"} or {"skipped"}}}}`, saved at each change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def stage(self, name: str) -> dict[str, Any]:
        return self.stages.setdefault(name, {"state": BEGUN, "seconds": 0.0, "items": {}})

    def save(self) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        temporary.write_text(json.dumps(self.stages, indent=1, default=str))
        temporary.replace(self.path)

    def bury(self, words: str) -> int:
        """The process that wrote this is dead: what it had begun has failed. How many items that are."""
        dead = 0
        for stage in self.stages.values():
            for name, value in stage["items"].items():
                if value == BEGUN:
                    stage["items"][name] = {"error": words}
                    dead += 1
        self.save()
        return dead


class Sheet:
    """One stage's items. What fails is written down, and the next item is tried; past the deadline none is."""

    def __init__(self, report: Report, stage: str, deadline: float, is_alive: Callable[[], bool]) -> None:
        self._report = report
        self._deadline = deadline
        self._is_alive = is_alive
        self.record = report.stage(stage)
        self.items: dict[str, Any] = self.record["items"]

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        self.items[name] = value
        self._report.save()

    def attempt(self, name: str, function: Callable[..., Any], *arguments: Any, needs: float = 2.0) -> Any:
        """The item's value; None if it failed, was skipped, or is of an earlier process. `needs`: seconds.

        Raises Broken when the device computes no more.
        """
        if name in self.items:
            return None
        if self.seconds_left < needs:
            self.put(name, {"skipped": f"{max(self.seconds_left, 0):.0f} s were left, it needs {needs:.0f}"})
            return None
        self.put(name, BEGUN)
        try:
            value = function(*arguments)
        except Exception:
            self.put(name, {"error": traceback.format_exc()[-4000:]})
            if not self._is_alive():
                raise Broken from None
            return None
        self.put(name, value)
        return value


class Broken(RuntimeError):
    """The GPU's context is lost: nothing more can be computed in this process."""


def is_trouble(value: Any) -> bool:
    return value == BEGUN or (isinstance(value, dict) and ("error" in value or value.get("ok") is False))


def table(report: Report) -> str:
    """A line for each item, its figures beside it, and what failed."""
    lines = []
    for name, stage in report.stages.items():
        lines.append(f"{name}: {stage['state']}, {stage['seconds']:.0f} s")
        lines += [f"  {item}: {_words(value)}" for item, value in stage["items"].items()]
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, dict) and "error" in value:
        return f"FAILED: {value['error'].strip().splitlines()[-1][:160]}"
    if isinstance(value, dict):
        shown = ", ".join(f"{key} {_number(each)}" for key, each in value.items() if not isinstance(each, list | dict))
        return ("WRONG: " if value.get("ok") is False else "") + shown
    return str(_number(value))[:200]


def _number(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
