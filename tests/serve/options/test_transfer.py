"""`kv_transfer_config`: connectors of vLLM's as options of this library."""

import pytest

from duetto import EngineArgs
from duetto.compat.config import KVTransferConfig
from duetto.serve.options.keywords import LLM_KEYWORDS, options_from_keywords


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (
            {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_rank": 0}
            | {"kv_connector_extra_config": {"shared_storage_path": "pages"}},
            {"kv_disk_path": "pages", "kv_disk_space": 16.0},
        ),
        (
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            | {"kv_connector_extra_config": {"cpu_bytes_to_use": 3 << 29}},
            {"swap_space": 1.5},
        ),
        (
            {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", "kv_parallel_size": 2},
            {"kv_role": "prefill", "kv_address": "127.0.0.1:14579"},
        ),
        (
            {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_ip": "::1", "kv_port": 5},
            {"kv_role": "decode", "kv_address": "::1:5"},
        ),
        ({}, {}),
        (None, {}),
    ],
)
def test_a_connector_is_options_of_this_library(config, options):
    assert options_from_keywords({"kv_transfer_config": config}) == options_from_keywords(options)
    given = vars(EngineArgs(kv_transfer_config=config))
    own = {name: value for name, value in given.items() if name not in LLM_KEYWORDS}
    assert options_from_keywords(own) == options_from_keywords(options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, "set swap_space or kv_disk_space"),
        ({"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, "set swap_space or kv_disk_space"),
        ({"kv_connector": "Own", "kv_connector_module_path": "own"}, "kv_connector_module_path='own'"),
        ({"kv_conector": "Own"}, "unknown key 'kv_conector', did you mean 'kv_connector'"),
    ],
)
def test_what_no_option_does_is_refused(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        options_from_keywords({"kv_transfer_config": config})


def test_an_option_is_given_once():
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer")
    with pytest.raises(TypeError, match="kv_role is given under two names: kv_transfer_config is the second"):
        options_from_keywords({"kv_transfer_config": config, "kv_role": "both"})
