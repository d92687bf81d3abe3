"""The same engine folder on many processes and machines: a deployment of Ray Serve.

    pip install ".[ray,serve]"
    python scripts/ray_serve.py engines/ --replicas 2
    python scripts/ray_serve.py engines/ --replicas 1 --most-replicas 4 --threads 2
    curl -N http://127.0.0.1:8000/story -H "Content-Type: application/json" \\
        -d '{"prompt": "Read Psalms 103.", "stream": false}'

Every replica opens the folder once and takes as many CPUs of Ray as it has ``--threads``. It
serves the app of ``examples/fastapi_app.py``: streamed and whole answers at ``/story``, and
``/health``; when a client leaves its generation ends. With ``--most-replicas`` their number follows
the requests that wait. Ray replaces a replica that dies. It serves this machine until Ctrl-C; with
``--address`` the machines of a Ray cluster, which have the package and the engine folder at the
same path, and the deployment stays when this program ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import fastapi_app

import specrun
from specrun import cli_errors, manifest
from specrun.options import EngineOptions

AHEAD = 4  # requests that a replica may have, the one at work among them


def deployment(folder: Path, options: argparse.Namespace) -> Any:
    """The application for ``serve.run``."""
    from ray import cloudpickle, serve

    cloudpickle.register_pickle_by_value(fastapi_app)  # other machines have the package alone
    where, threads = str(folder), options.threads

    def app() -> Any:  # made in the replica, which opens the engine
        return fastapi_app.make_app(where, threads=threads)

    class Replica:
        """A process with the folder open."""

    number: dict[str, Any] = {"num_replicas": options.replicas}
    if options.most_replicas is not None:
        scaling = {"min_replicas": options.replicas, "max_replicas": options.most_replicas}
        number = {"autoscaling_config": {**scaling, "target_ongoing_requests": AHEAD / 2}}
    deployed = serve.deployment(
        name="specrun",
        ray_actor_options={"num_cpus": threads},
        max_ongoing_requests=AHEAD,
        **number,
    )
    return deployed(serve.ingress(app)(Replica)).bind()


def start(options: argparse.Namespace) -> None:
    """Deploy, and return when requests are answered. Raises SpecrunError."""
    folder = options.folder.resolve()
    EngineOptions(threads=options.threads)
    manifest.read(folder, drafters_may_miss=True)  # an error here says more than one of a replica
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when it is imported
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise specrun.UsageError(f"Ray is needed: {error}", hint='pip install ".[ray]"') from error
    if not ray.is_initialized():
        most = options.most_replicas or options.replicas
        own: dict[str, Any] = {"address": options.address}
        if options.address is None:
            own = {"address": "local", "num_cpus": most * options.threads + 1}
            own |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            own |= {"object_store_memory": 128 << 20}
        ray.init(log_to_driver=False, logging_level="error", **own)
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(deployment(folder, options), name="specrun")


@cli_errors.reports_errors
def main(arguments: Sequence[str] | None = None) -> None:
    """Deploy and, without a cluster, serve until Ctrl-C or SIGTERM."""
    add = (
        parser := argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    ).add_argument
    add("folder", type=Path, help="engine folder")
    add("--replicas", type=int, default=1, help="processes with the folder open")
    add("--most-replicas", type=int, help="scale up to so many")
    add("--threads", type=int, default=1, help="of a replica, CPUs that Ray gives it")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--address", help="of a Ray cluster; else one of this machine, while this runs")
    options = parser.parse_args(arguments)
    start(options)
    print(f"serves {options.folder} at http://{options.host}:{options.port}", file=sys.stderr)
    if options.address is None:
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait()


if __name__ == "__main__":
    main()
