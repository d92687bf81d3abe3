"""What a generation did, token by token, for people to look at.

    from specrun import trace

    recorder = trace.Recorder()
    result = engine.generate("Read Psalms 103.", logprobs=5, on_round=recorder)
    recorder.write_page("out.html", engine, result)

A page is one file that needs no network and opens from the disk. :meth:`Recorder.trace` gives what
is on it as data. Asking for ``logprobs`` adds alternatives and costs reading the target's logits;
the tokens stay the same.
"""

from specrun.trace.page import page, write_page
from specrun.trace.record import Trace, TracedRound, TracedToken, write_json
from specrun.trace.recorder import Recorder

__all__ = [
    "Recorder",
    "Trace",
    "TracedRound",
    "TracedToken",
    "page",
    "write_json",
    "write_page",
]
