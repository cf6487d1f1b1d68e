"""What a cache held is found by another engine; folders of other models, and those of others, are refused."""

import errno
import gc
import math
import os
import re
import shutil
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases.requests import SIZES

from duetto import LLM, SamplingParams
from duetto.serve.planner.roofline.report import render_engine_report

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
PROMPTS = [np.random.default_rng(i).integers(3, 250, 50 + i).tolist() for i in range(3)]


def exact(outputs) -> list:
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.fixture(scope="module")
def begin(tiny):
    return lambda **options: LLM.from_params(tiny.config, tiny.params, **(SIZES | options))


@pytest.fixture(scope="module")
def saved(begin, tmp_path_factory):
    """A folder, and the answers of the engine that wrote it."""
    folder = tmp_path_factory.mktemp("saved") / "cache"
    with begin() as llm:
        answers = exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert llm.save_cache(folder) == len(list(folder.rglob("*.page"))) == 3 * (69 // 16)
        assert exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == answers
    return folder, answers


def test_another_engine_goes_on_from_a_saved_cache(begin, saved):
    folder, answers = saved
    with begin() as llm:
        llm.load_cache(folder)
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert exact(found) == answers and [o.num_cached_tokens for o in found] == [48, 48, 48]
        whole = [prompt + list(tokens) for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
        longer = llm.generate(whole, GREEDY, use_tqdm=False)
        written = 64 if llm.engine.classes.same_bits else 48
        assert [o.num_cached_tokens for o in longer] == [written] * 3
        assert llm.report()["compilations"] == 0


def test_other_weights_find_nothing_and_are_told(begin, saved, tiny):
    folder, _ = saved
    flipped = np.array(tiny.params.embed)
    flipped[-1, -1] = np.nextafter(flipped[-1, -1], 1, dtype=flipped.dtype)
    with begin() as llm:
        llm.update_params(replace(tiny.params, embed=jax.device_put(flipped)))
        with pytest.raises(ValueError, match="of another model, other weights"):
            llm.load_cache(folder)
        llm.update_params(tiny.params)
        llm.load_cache(folder)
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 48


def test_what_cannot_be_loaded_or_saved_is_refused(begin, tmp_path):
    with begin() as llm:
        for path, why in ((tmp_path / "nowhere", "No such file"), (tmp_path, "expected what"), ("", "''")):
            with pytest.raises(ValueError, match=f"load_cache: no saved cache in .*{why}"):
                llm.load_cache(path)
        if hasattr(os, "geteuid"):
            tmp_path.chmod(0o777)
            with pytest.raises(ValueError, match="others own it or can write"):
                llm.save_cache(tmp_path)
            tmp_path.chmod(0o700)
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="save_cache: .*file' is not allowed for pages: .* is no folder"):
            llm.save_cache(tmp_path / "file")
        with pytest.raises(ValueError, match="load_cache: no saved cache in .*file': Not a directory"):
            llm.load_cache(tmp_path / "file")
        llm.sleep()
        for method in (llm.save_cache, llm.load_cache):
            with pytest.raises(RuntimeError, match="_cache: the engine sleeps"):
                method(tmp_path)
        llm.sleep(level=2)
        llm.wake_up()
        for method in (llm.save_cache, llm.load_cache):
            with pytest.raises(RuntimeError, match="_cache: .*discarded the parameters"):
                method(tmp_path)
    with begin(enable_prefix_caching=False) as llm:
        for method in (llm.save_cache, llm.load_cache):
            with pytest.raises(ValueError, match="without enable_prefix_caching"):
                method(tmp_path)


def test_a_disk_that_is_full_is_named(begin, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with begin() as llm:
        answers = exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left") as found:
            patched.setattr(os, "replace", full)
            llm.save_cache(tmp_path)
        assert found.value.filename == str(tmp_path)
        with pytest.raises(ValueError, match="no saved cache"):
            llm.load_cache(tmp_path)
        assert exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == answers


def test_each_saved_cache_that_is_loaded_is_counted_alone(begin, saved, tmp_path):
    folder, _ = saved
    shutil.copytree(folder, tmp_path / "copy")
    with begin() as llm:
        for path in (folder, folder, tmp_path / "copy", folder):
            llm.load_cache(path)
        assert set(llm.report()["tiers"]) >= {"snapshot", "snapshot 2"}
        assert len(llm.engine.page_finder.mover.tier.tiers) == 2
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert sum(llm.report()["tiers"][name]["hits"] for name in ("snapshot", "snapshot 2")) == 3


def test_space_for_pages_is_checked(begin, tmp_path):
    for name in ("swap_space", "kv_disk_space"):
        for value in (-1.0, math.nan, math.inf, 1e308):
            with pytest.raises(ValueError, match=f"{name} {re.escape(str(value))} is not allowed"):
                begin(**{name: value})
        with pytest.raises(ValueError, match=f"{name} 1e-09 GiB holds no page: 16 tokens take"):
            begin(**{name: 1e-9})
    with pytest.raises(ValueError, match="kv_disk_path '' is not allowed"):
        begin(kv_disk_space=1, kv_disk_path="")
    with pytest.raises(ValueError, match="kv_disk_path 'x' is not allowed without kv_disk_space"):
        begin(kv_disk_path="x")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="kv_disk_path: .*file' is not allowed for pages: .* is no folder"):
        begin(kv_disk_space=1, kv_disk_path=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="kv_disk_space is not allowed without enable_prefix_caching"):
        begin(kv_disk_space=1, enable_prefix_caching=False)
    with begin(swap_space=4, enable_prefix_caching=False) as llm:  # as vLLM's scripts have it
        assert "tiers" not in llm.report()


def test_a_deleted_engine_ends_its_thread(begin):
    with begin(swap_space=1) as llm:
        assert any(t.name == "duetto-page-mover" for t in threading.enumerate())
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    assert not any(t.name == "duetto-page-mover" for t in threading.enumerate())


def test_files_outlive_the_process_with_what_the_pool_had(begin, tmp_path):
    """Nothing was evicted: the pool's pages are written when the engine is closed."""
    disk = {"kv_disk_space": 1, "kv_disk_path": str(tmp_path)}
    with begin(**disk) as llm:
        answers = exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert not list(tmp_path.rglob("*.page"))
    with begin(**disk) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert exact(found) == answers and [o.num_cached_tokens for o in found] == [48, 48, 48]
        assert "disk" in render_engine_report(llm.report())
        llm.sleep()  # an engine that sleeps has nothing to write


def test_the_disk_tier_reopens_after_a_sleep_and_reset(begin, tmp_path):
    with begin(kv_disk_space=1, kv_disk_path=str(tmp_path)) as llm:
        llm.sleep()
        llm.reset_prefix_cache(reset_connector=True)
        llm.wake_up(["kv_cache"])
        assert "disk" not in llm.report()["tiers"]
        llm.wake_up()
        assert "disk" in llm.report()["tiers"]


def test_more_memory_than_there_is_is_refused(begin):
    with pytest.raises(ValueError, match=r"swap_space 1e\+06 GiB is more than the host's memory"):
        begin(swap_space=1_000_000)
