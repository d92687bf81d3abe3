"""Ten lines that put a model into a program.

python scripts/examples/embedded.py engines/ "Read Psalms 103."
"""

import sys

import specrun

if len(sys.argv) != 3:
    sys.exit(f"usage: embedded.py FOLDER PROMPT\n\n{__doc__}")
folder, prompt = sys.argv[1:]
with specrun.load(folder) as engine:
    with engine.stream(prompt, max_new_tokens=64) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
    stats = stream.result.stats
print(f"\n[{stats.emitted} tokens in {stats.target_steps + 1} runs of the target]")
