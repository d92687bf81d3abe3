"""Structured output with drafting: valid always, and greedily what plain decoding gives.

    python scripts/check_structured.py engines/
    python scripts/check_structured.py engines/ --method prompt-lookup --count 50

Two hundred texts are sampled, spread over all methods of the folder that draft, some JSON schemas
and temperatures, and each is checked with jsonschema. For every method and schema the greedy text
is compared, token for token, with that of plain decoding under the same schema, in exact mode,
where near ties count too. Shows tokens per target step, and exits with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

import specrun

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
NEW = 400  # tokens; the schemas bound all texts well below

Schema = dict[str, Any]


def text(most: int) -> Schema:
    """A string of up to ``most`` characters: a tiny model would not find the end of one."""
    return {"type": "string", "maxLength": most}


def closed(**properties: Schema) -> Schema:
    """An object that has all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CASES: dict[str, tuple[str, Schema]] = {
    "country": (
        "Describe France as JSON with its name, population and languages.",
        closed(
            name=text(24),
            population={"type": "integer", "minimum": 0, "maximum": 10**10},
            languages={"type": "array", "items": text(12), "minItems": 1, "maxItems": 3},
        ),
    ),
    "review": (
        "Review the film Casablanca as JSON with title, rating, seen and tags.",
        closed(
            title=text(24),
            rating={"type": "integer", "minimum": 1, "maximum": 10},
            seen={"type": "boolean"},
            tags={"type": "array", "items": {"enum": ["fun", "sad", "long"]}, "maxItems": 3},
        ),
    ),
    "cities": (
        "List two cities with their countries as JSON, like Rome in Italy.",
        {
            "type": "array",
            "items": closed(city=text(12), country=text(12)),
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    "event": (
        "Give the date of the moon landing and its place as JSON.",
        closed(
            date={"type": "string", "format": "date"},
            place={"anyOf": [{"type": "null"}, closed(name=text(16))]},
            code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
        ),
    ),
    "tree": (
        "A family tree as JSON with a name and children.",
        {
            "$ref": "#/$defs/leaf2",
            "$defs": {
                "leaf": closed(name=text(8)),
                "leaf1": closed(
                    name=text(8),
                    children={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
                ),
                "leaf2": closed(
                    name=text(8),
                    children={"type": "array", "items": {"$ref": "#/$defs/leaf1"}, "maxItems": 2},
                ),
            },
        },
    ),
}


@dataclass
class Report:
    """What was found. ``faults``: what is wrong, a line each."""

    sampled: int = 0
    valid: int = 0
    compared: int = 0
    equal: int = 0
    steps: dict[str, list[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def count(self, method: str, result: specrun.Result) -> None:
        """Tokens and target steps of a method."""
        found = self.steps.setdefault(method, [0, 0])
        found[0] += result.stats.emitted
        found[1] += result.stats.target_steps

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"sampled  {self.valid} of {self.sampled} valid"
        yield f"greedy   {self.equal} of {self.compared} equal plain constrained decoding"
        for method, (tokens, steps) in self.steps.items():
            yield f"{method:<14} {tokens / max(1, steps):.2f} tokens per target step"
        yield from self.faults


def fault_of(result: specrun.Result, schema: Schema) -> str | None:
    """What is wrong with a text; None: it is complete, compact and valid."""
    if result.finish_reason != "eos":
        return f"ended by {result.finish_reason}: {result.text!r}"
    try:
        value = json.loads(result.text)
        jsonschema.validate(value, schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}: {result.text!r}"
    return None


def sample(engine: specrun.Engine, methods: Sequence[str], count: int, report: Report) -> None:
    """``count`` texts, methods, schemas and temperatures in turn."""
    turns = itertools.product(TEMPERATURES, CASES, methods)
    for seed, (temperature, name, method) in zip(
        range(count), itertools.cycle(turns), strict=False
    ):
        prompt, schema = CASES[name]
        result = engine.generate(
            prompt,
            method=method,
            json_schema=schema,
            temperature=temperature,
            seed=seed,
            max_new_tokens=NEW,
            strict=True,
        )
        report.sampled += 1
        report.count(method, result)
        if fault := fault_of(result, schema):
            report.faults.append(f"{method}, {name}, seed {seed}: {fault}")
        else:
            report.valid += 1


def compare(engine: specrun.Engine, methods: Sequence[str], report: Report) -> None:
    """Greedy texts of every method and schema with those of plain decoding."""
    for name, (prompt, schema) in CASES.items():
        given: dict[str, Any] = {
            "json_schema": schema,
            "do_sample": False,
            "max_new_tokens": NEW,
            "strict": True,
        }
        plain = engine.generate(prompt, method="plain", **given)
        for method in methods:
            result = engine.generate(prompt, method=method, **given)
            report.compared += 1
            report.count(f"{method}*", result)
            if result.tokens == plain.tokens:
                report.equal += 1
            else:
                report.faults.append(f"{method}, {name}: {result.text!r}, plain {plain.text!r}")


def check(folder: Path, methods: Sequence[str] = (), count: int = 200) -> Report:
    """All of it, on an engine folder; ``methods``: none are all that it has and that draft."""
    report = Report()
    with specrun.load(folder) as engine:
        used = list(methods) or [*engine.manifest.drafters, "prompt-lookup"]
        sample(engine, used, count, report)
    with specrun.load(folder, exact=True) as engine:
        compare(engine, used, report)
    return report


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="engines that specexport wrote")
    parser.add_argument("--method", action="append", default=[], help="repeatable")
    parser.add_argument("--count", type=int, default=200, help="texts that are sampled")
    arguments = parser.parse_args()
    report = check(arguments.folder, arguments.method, arguments.count)
    print("\n".join(report.lines()))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
