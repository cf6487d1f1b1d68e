"""An engine starts with random weights, and reads the real ones later."""

from duetto import LLM, SamplingParams

PROMPTS = ["def f(", "import"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5)
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS)]


def main():
    wanted = texts(LLM(model="checkpoints/demo", dtype="float32", **SIZES))
    llm = LLM(model="checkpoints/demo", dtype="float32", load_format="dummy", **SIZES)
    print("random:", texts(llm) != wanted)
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")
    print("read:", texts(llm) == wanted)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": "checkpoints/demo"})
    llm.wake_up(tags=["kv_cache"])
    print("after a sleep:", texts(llm) == wanted)


if __name__ == "__main__":
    main()
