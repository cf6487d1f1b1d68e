"""A process that compiles grammars, each in a fork of its own with bounds that the kernel keeps.

Run as `python child.py FOLDER`, where FOLDER has llguidance; imports nothing else than the standard library.
It reads a pickled vocabulary. Forks that are made ahead then read one pickled order each, for a grammar, and
write a pickled report of it. The process ends when its standard input does.
"""

import json
import os
import pickle
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

STACK = 4 << 20  # bytes: half of a usual thread's, so that a grammar that fits here fits in a server's thread
UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of ru_maxrss
SIZE = Path("/proc/self/statm")


class ChildVocabulary:
    """The attributes that llguidance's TokenizerWrapper reads."""

    def __init__(self, given: dict[str, Any]):
        self.tokens, self.special_token_ids = given["tokens"], given["special"]
        self.eos_token_id, self.bos_token_id = given["ends"][0], None
        self._ids = {token: i for i, token in enumerate(self.tokens) if token}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Return tokens of a text that a grammar forces, the longest first: the choice does not change the
        cost."""
        left, found = text.encode(), list[int]()
        while left:
            ends = range(min(len(left), self._longest), 0, -1)
            end = next((end for end in ends if left[:end] in self._ids), 0)
            found += [self._ids[left[:end]]] if end else []
            left = left[end or 1 :]
        return found


def main() -> None:
    given = pickle.load(sys.stdin.buffer)
    sys.path.append(sys.argv[1])
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(ChildVocabulary(given))
    vocabulary = LLTokenizer(wrapper, n_vocab=len(given["tokens"]), eos_token=given["ends"])
    report()  # orders come from now on: none is read with the vocabulary
    while True:
        pid = os.fork()
        if not pid:
            serve_one(vocabulary)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            report(signal=os.WTERMSIG(status))
        elif status:
            return


def serve_one(vocabulary: Any) -> NoReturn:
    """Read an order, compile its grammar in this process, report it, and exit; with code 1 at the end of the
    input."""
    code = 1
    try:
        order = pickle.load(sys.stdin.buffer)
        bound(order)
        before = memory()
        lark, error = translated(order["text"])
        error = error or compiled(vocabulary, lark or order["text"], order["limits"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        report(error=error[:4096], bytes=max(0, memory() - before), lark=lark)
        code = 0
    finally:
        os._exit(code)


def report(error: str = "", bytes: int = 0, signal: int = 0, lark: str = "") -> None:
    pickle.dump({"error": error, "bytes": bytes, "signal": signal, "lark": lark}, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def bound(order: dict[str, Any]) -> None:
    """Let the kernel end this process beyond its processor time, memory or stack."""
    os.nice(order["nice"])
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_STACK, STACK)
    if SIZE.exists():
        pages = int(SIZE.read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + order["bytes"])
    signal.setitimer(signal.ITIMER_PROF, order["seconds"])


def limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def translated(text: str) -> tuple[str, str]:
    """Return a grammar in Lark, or in llguidance's JSON with Lark, if it is GBNF (llama.cpp's notation); and
    an error."""
    if "::=" not in text:
        return "", ""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if not text.lstrip().startswith("{"):
            return any_to_lark(text), ""
        whole = json.loads(text)
        for one in whole["grammars"]:
            if isinstance(one.get("lark_grammar"), str) and "::=" in one["lark_grammar"]:
                one["lark_grammar"] = any_to_lark(one["lark_grammar"])
        return json.dumps(whole), ""
    except Exception as error:  # noqa: BLE001 - not all that the converter raises has a kind of its own
        return "", str(error)


def compiled(vocabulary: Any, text: str, limits: dict[str, Any]) -> str:
    """Return the error of a grammar or of its first mask; empty without one, and after a panic."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()
    except BaseException:  # noqa: BLE001 - a panic is no Exception; the server's own compilation names it
        return ""


def memory() -> int:
    """Return the bytes of this process alone; where the system does not count them, its peak."""
    if not SIZE.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    _, resident, shared, *_ = map(int, SIZE.read_text().split())
    return (resident - shared) * resource.getpagesize()


if __name__ == "__main__":
    main()
