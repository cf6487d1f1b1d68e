"""Run three logits processors, compiled into the step, with requests that use them.

`python examples/logits_processors.py [MODEL]`. From this folder, `duetto serve --logits-processors
logits_processors:no_repeated_ngram` serves one of them.
"""

import sys

import jax.numpy as jnp

from duetto import LLM, SamplingParams, logits_processor

NONE = 2**31 - 1  # beyond every vocabulary: jax drops an update there


@logits_processor(banned=(NONE,) * 16, banned_steps=0)
def ban_at_first(logits, history, knobs):
    """Ban tokens in the first steps of an output."""
    early = history.generated < knobs["banned_steps"]
    return jnp.where(early, logits.at[knobs["banned"]].set(-jnp.inf), logits)


@logits_processor(ngram_size=0)
def no_repeated_ngram(logits, history, knobs):
    """Ban tokens that would repeat an n-gram of prompt and output, n at most 8."""
    n, place = knobs["ngram_size"], jnp.arange(history.tokens.size)
    same = (n > 0) & (place >= n - 1) & (place < history.length)
    for back in range(1, 8):
        last = history.tokens[history.length - back]
        same &= (back >= n) | (jnp.roll(history.tokens, back) == last)
    return logits.at[jnp.where(same, history.tokens, NONE)].set(-jnp.inf)


@logits_processor(thinking_budget=-1, thinking_end=NONE)
def thinking_budget(logits, history, knobs):
    """Close the reasoning after a number of tokens: then only its end mark may follow."""
    end, most = knobs["thinking_end"], knobs["thinking_budget"]
    closed = history.output_counts.at[end].get(mode="fill", fill_value=0) > 0
    is_over = (most >= 0) & (history.generated >= most) & ~closed
    return jnp.where(is_over & (jnp.arange(logits.size) != end), -jnp.inf, logits)


def main() -> None:
    processors = [ban_at_first, no_repeated_ngram, thinking_budget]
    llm = LLM(*sys.argv[1:2], logits_processors=processors, max_model_len=256, max_num_seqs=4)
    prompt = "def read_lines(path):\n"
    (plain,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    first = plain.outputs[0].token_ids[0]
    asked = [None, {"banned": [first], "banned_steps": 4}, {"ngram_size": 2}]
    params = [SamplingParams(temperature=0, max_tokens=24, extra_args=extra) for extra in asked]
    for extra, output in zip(asked, llm.generate([prompt] * 3, params, use_tqdm=False), strict=True):
        print(extra, repr(output.outputs[0].text))
    llm.close()


if __name__ == "__main__":
    main()
