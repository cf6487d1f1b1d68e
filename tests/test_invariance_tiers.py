"""Rows of the invariance suite for pages from the host's memory, from files, and from a saved cache."""

import pytest
from cases.invariance import LENGTHS, PARAMS, bits, prompts
from fakes.tiers import always_fetching

SMALL = {
    "max_model_len": 230, "max_batched_token_mem": 320, "page_size": 16, "max_num_seqs": 4,
    "max_prefill_tokens": 64, "decode_steps": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "model",
    ["tiny", "windows, int8 cache", "latent, fp8_e5m2 cache", "bfloat16", "demo"],
    indirect=True,
    scope="session",
)
def test_pages_from_the_host_and_from_a_saved_cache_have_the_same_bits(model, serve, expected, tmp_path):
    """Preempted requests go on from swapped pages, and prompts find what the pool has lost; then all of it is
    found again in a folder."""
    texts = prompts(model.config.vocab_size)
    with always_fetching(serve(**SMALL, swap_space=1)) as llm:
        for _ in range(3):
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        report = llm.report()
        assert report["tiers"]["fetched"] > 0 and report["compilations"] == 0
        assert llm.save_cache(tmp_path) == len(list(tmp_path.rglob("*.page"))) > 0
        llm.reset_prefix_cache(reset_connector=True)
        llm.load_cache(tmp_path)
        found = llm.generate(texts, PARAMS, use_tqdm=False)
        assert [bits(o) for o in found] == expected
        assert [o.num_cached_tokens for o in found] == [(n - 1) // 16 * 16 for n in LENGTHS]
        assert llm.report()["tiers"]["snapshot"]["hits"] > 0


@pytest.mark.parametrize("model", ["tiny", "demo"], indirect=True, scope="session")
def test_pages_from_files_have_the_same_bits(model, serve, expected, tmp_path):
    """In the process that wrote them, and in one that is started over them; damaged ones are computed
    again."""
    texts, disk = prompts(model.config.vocab_size), {"kv_disk_space": 1, "kv_disk_path": str(tmp_path)}
    with always_fetching(serve(**SMALL, **disk)) as llm:
        for _ in range(2):
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        assert llm.report()["tiers"]["disk"]["hits"] > 0
    files = sorted(tmp_path.rglob("*.page"))
    for file in files[::3]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with always_fetching(serve(**SMALL, **disk)) as llm:
        assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        report = llm.report()["tiers"]["disk"]
        assert report["hits"] > 0 and report["damaged"] > 0


@pytest.mark.parametrize("model", ["tiny"], indirect=True, scope="session")
def test_guesses_on_pages_from_the_host_change_no_bit(model, serve, expected):
    texts, config = (
        prompts(model.config.vocab_size),
        {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    )
    with always_fetching(serve(**SMALL, swap_space=1, speculative_config=config)) as llm:
        for _ in range(2):
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        report = llm.report()
        assert report["tiers"]["fetched"] > 0 and report["speculation"]["drafted"] > 0
