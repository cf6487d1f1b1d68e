"""A prefill engine and a decode engine on two devices of one process."""

from typing import Any

import jax
import pytest
from fakes.handover import soon
from suite.fixtures import random_model

from duetto import LLM, SamplingParams
from duetto.serve.runtime.multihost.supervisor import free_port

pytestmark = pytest.mark.full
SIZES = {"max_num_seqs": 2, "max_prefill_tokens": 64, "max_model_len": 128, "page_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 70, 3))]


@pytest.fixture(scope="module")
def begin():
    model = random_model("tiny")
    return lambda **options: LLM.from_params(model.config, model.params, **(SIZES | options))


def exact(outputs) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.fixture(scope="module")
def wanted(begin):
    with begin() as llm:
        return exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_an_engine_on_each_device_gives_the_bits_of_one(begin, wanted):
    with begin(kv_role="both", prefill_devices=1, decode_devices=1) as llm:
        first, second = jax.devices()
        assert llm.params.embed.sharding.device_set == {second}
        peer = llm.engine.page_finder.mover.remote_kv
        theirs = peer.service.session.engine.params
        assert theirs.embed.sharding.device_set == {first}
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert exact(found) == wanted and [o.num_cached_tokens for o in found] == [48, 64, 0]


@pytest.mark.parametrize("reproducible", [True, False])
def test_pages_of_another_layout_need_reproducible_off(begin, wanted, reproducible):
    """Heads that lay on two devices lie on one."""
    place, options = f"127.0.0.1:{free_port()}", {"reproducible": reproducible}
    with (
        begin(kv_role="prefill", kv_address=place, tensor_parallel_size=2, **options),
        begin(kv_role="decode", kv_address=place, **options) as llm,
    ):
        source = llm.engine.page_finder.mover.remote_kv.tiers[place].service
        soon(lambda: reproducible or source.is_connected)
        found = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]  # one after the other
        assert [tokens for tokens, _ in exact(found)] == [tokens for tokens, _ in wanted]
        cached = [o.num_cached_tokens for o in found]
        assert cached == ([0, 0, 0] if reproducible else [48, 64, 0])


def test_more_devices_than_there_are_are_refused(begin):
    with pytest.raises(ValueError, match="prefill_devices and decode_devices are 3 together, there are 2"):
        begin(kv_role="both", prefill_devices=1, decode_devices=2)
