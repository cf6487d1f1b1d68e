"""`ShardedStateLoader`, whose constants scripts for vLLM show in their help texts."""


class ShardedStateLoader:
    """Patterns of the files of `LLM.save_params`. Orbax names them, whatever the parallel sizes are."""

    TP_ONLY_PATTERN = PP_AND_TP_PATTERN = "params/*"
