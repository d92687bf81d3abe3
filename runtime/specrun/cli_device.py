"""Options of the command line that say where engines run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from specrun.options import EngineOptions

ENGINE = EngineOptions()


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device``, ``--device-id`` and ``--provider-library``."""
    library = click.option(
        "--provider-library",
        type=click.Path(),
        default=ENGINE.provider_library,
        help="Shared library of a provider that onnxruntime does not bring, for plugin:NAME.",
    )
    number = click.option(
        "--device-id",
        type=int,
        default=ENGINE.device_id,
        show_default=True,
        help="Which of several devices.",
    )
    device = click.option(
        "--device",
        default=ENGINE.device,
        show_default=True,
        help="Where engines run: cpu, cuda and more; see docs/devices.md.",
    )
    return device(number(library(command)))


cuda_graph_option = click.option(
    "--cuda-graph",
    is_flag=True,
    help="With --exact: record runs of the target on the GPU and replay them.",
)
