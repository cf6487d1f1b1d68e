"""Fields of a line that ask for nothing, so that programs which always send them run.

A field or a value that would change the answer is in neither table, and is refused.
"""

from ....refusals import Table

# Who asks, how it is filed, cached or hurried: no value changes the text.
HARMLESS = frozenset(
    {
        "cache_salt",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)

# Fields that are understood only as far as they ask for nothing, with the values that do: where there are no
# tools, no call is to be chosen or made beside others, and a completion is all of a text.
NEUTRAL: Table = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
