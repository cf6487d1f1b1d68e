"""A process that compiles grammars, each in a fork of its own with bounds that the kernel keeps.

Run as `python child.py FOLDER`, where FOLDER has llguidance; imports nothing else than the standard library
and `gbnf.py` beside it.
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

# Half of a usual thread's, so that a grammar that fits here fits in a server's thread.
STACK_BYTES = 4 << 20
MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of ru_maxrss
MEMORY_FILE = Path("/proc/self/statm")


class ChildVocabulary:
    """The attributes that llguidance's TokenizerWrapper reads."""

    def __init__(self, message: dict[str, Any]):
        self.tokens, self.special_token_ids = message["tokens"], message["special"]
        self.eos_token_id, self.bos_token_id = message["ends"][0], None
        self._ids = {token: i for i, token in enumerate(self.tokens) if token}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Return tokens of a text that a grammar forces, the longest first: the choice does not change the
        cost."""
        remaining, token_ids = text.encode(), list[int]()
        while remaining:
            ends = range(min(len(remaining), self._longest), 0, -1)
            end = next((end for end in ends if remaining[:end] in self._ids), 0)
            token_ids += [self._ids[remaining[:end]]] if end else []
            remaining = remaining[end or 1 :]
        return token_ids


def main() -> None:
    message = pickle.load(sys.stdin.buffer)
    sys.path += [sys.argv[1], str(Path(__file__).parent)]
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(ChildVocabulary(message))
    vocabulary = LLTokenizer(wrapper, n_vocab=len(message["tokens"]), eos_token=message["ends"])
    write_report()  # orders come from now on: none is read with the vocabulary
    while True:
        pid = os.fork()
        if not pid:
            run_compile_job(vocabulary)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            write_report(signal=os.WTERMSIG(status))
        elif status:
            return


def run_compile_job(vocabulary: Any) -> NoReturn:
    """Read an order, compile its grammar in this process, report it, and exit; with code 1 at the end of the
    input."""
    code = 1
    try:
        job = pickle.load(sys.stdin.buffer)
        limit_process(job)
        before = used_memory()
        lark, error = translate_gbnf(job["text"])
        error = error or find_grammar_error(vocabulary, lark or job["text"], job["limits"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_report(error=error[:4096], bytes=max(0, used_memory() - before), lark=lark)
        code = 0
    finally:
        os._exit(code)


def write_report(error: str = "", bytes: int = 0, signal: int = 0, lark: str = "") -> None:
    pickle.dump({"error": error, "bytes": bytes, "signal": signal, "lark": lark}, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def limit_process(job: dict[str, Any]) -> None:
    """Let the kernel end this process beyond its processor time, memory or stack."""
    os.nice(job["nice"])
    set_resource_limit(resource.RLIMIT_CORE, 0)
    set_resource_limit(resource.RLIMIT_STACK, STACK_BYTES)
    if MEMORY_FILE.exists():
        pages = int(MEMORY_FILE.read_text().split()[0])
        set_resource_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + job["bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the server's process may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, job["seconds"])


def set_resource_limit(kind: int, max_value: int) -> None:
    _, hard = resource.getrlimit(kind)
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(
            kind, (max_value if hard == resource.RLIM_INFINITY else min(max_value, hard), hard)
        )


def translate_gbnf(text: str) -> tuple[str, str]:
    """Return a grammar in Lark, or in llguidance's JSON with Lark, if it is GBNF (llama.cpp's notation); and
    an error."""
    if "::=" not in text:
        return "", ""
    try:
        if not text.lstrip().startswith("{"):
            return convert_to_lark(text), ""
        llguidance_json = json.loads(text)
        for grammar in llguidance_json["grammars"]:
            if isinstance(grammar.get("lark_grammar"), str):
                grammar["lark_grammar"] = convert_to_lark(grammar["lark_grammar"])
        return json.dumps(llguidance_json), ""
    except Exception as error:  # noqa: BLE001 - not all that the converter raises has a kind of its own
        return "", str(error)


def convert_to_lark(text: str) -> str:
    """Return a grammar in Lark, translated if it is GBNF."""
    from gbnf import is_gbnf, normalise_gbnf
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return gbnf_to_lark(normalise_gbnf(text)) if is_gbnf(text) else text


def find_grammar_error(vocabulary: Any, text: str, limits: dict[str, Any]) -> str:
    """Return the error of a grammar or of its first mask; empty without one, and after a panic."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()
    except BaseException:  # noqa: BLE001 - a panic is no Exception; the server's own compilation names it
        return ""


def used_memory() -> int:
    """Return the bytes of this process alone; where the system does not count them, its peak."""
    if not MEMORY_FILE.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT_BYTES
    _, resident, shared, *_ = map(int, MEMORY_FILE.read_text().split())
    return (resident - shared) * resource.getpagesize()


if __name__ == "__main__":
    main()
