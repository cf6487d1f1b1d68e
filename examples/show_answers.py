"""Print the first answers of a batch with their prompts: python examples/show_answers.py IN.jsonl OUT.jsonl
[COUNT]"""

import json
import sys
from itertools import islice
from pathlib import Path


def show(prompts: Path, answers: Path, count: int) -> None:
    with prompts.open() as asked, answers.open() as answered:
        for line, answer in islice(zip(asked, answered, strict=True), count):
            question, reply = json.loads(line), json.loads(answer)
            print(f"--- {reply['id']} ({reply['finish_reason']})")
            print(question["prompt"] + reply["text"])


if __name__ == "__main__":
    show(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 3)
