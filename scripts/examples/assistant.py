"""An assistant in the terminal: it streams, remembers, and Ctrl-C stops an answer, not the program.

    python scripts/examples/assistant.py engines/ --system "Answer briefly."

``/undo`` takes back the last question with its answer, ``/new`` begins anew, ``/quit`` (or Ctrl-D)
ends it. The KV of the conversation is kept: of every turn only what is new is read.
"""

import argparse
import sys

import specrun


class Assistant:
    """A chat of an engine."""

    def __init__(self, engine: specrun.Engine, system: str | None, max_new_tokens: int) -> None:
        self._chat = engine.chat(system=system, max_new_tokens=max_new_tokens)

    def answer(self, question: str) -> specrun.Result:
        """Print the answer while it comes; Ctrl-C ends it, and what was said stays."""
        stream = self._chat.stream(question)
        try:
            for channel, text in stream:
                if channel == "content":
                    print(text, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        print()
        return stream.partial

    def undo(self) -> bool:
        """Take back the last question and its answer; whether there was one."""
        there = bool(self._chat.messages)
        if there:
            self._chat.undo()
        return there

    def new(self) -> None:
        """Forget the conversation."""
        self._chat.messages = []


def main() -> None:
    """Read questions until the end of the input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer")
    asked = parser.parse_args()
    with specrun.load(asked.folder) as engine:
        talk(Assistant(engine, asked.system, asked.max_new_tokens))


def talk(assistant: Assistant) -> None:
    """One line after the other; questions on stdin, answers on stdout, the rest on stderr."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        command = line.strip()
        if not line or command == "/quit":
            return
        if command == "/undo":
            print("taken back" if assistant.undo() else "there is nothing", file=sys.stderr)
        elif command == "/new":
            assistant.new()
        elif command:
            try:
                result = assistant.answer(command)
            except specrun.SpecrunError as error:
                print(f"Error: {error}\nhint: {error.hint}", file=sys.stderr)
            else:
                stats = result.stats
                shares = f"{stats.accepted} of {stats.emitted} tokens drafted"
                print(f"[{result.finish_reason}, {shares}]", file=sys.stderr)


if __name__ == "__main__":
    main()
