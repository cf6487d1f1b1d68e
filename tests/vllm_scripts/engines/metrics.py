"""What the engine counted, and each request's own times."""

from duetto import LLM, SamplingParams
from duetto.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(
    model="checkpoints/demo",
    max_model_len=256,
    max_num_seqs=8,
    block_size=16,
    max_num_batched_tokens=64,
    disable_log_stats=False,
)
outputs = llm.generate(
    ["def f(", "def g("], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, ignore_eos=True)
)
for output in outputs:
    times = output.metrics
    assert times is not None
    print(
        "in order:",
        times.scheduled_ts <= times.first_token_ts <= times.last_token_ts,
        times.num_generation_tokens,
    )
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram) of {metric.count}, {len(metric.buckets)} buckets")
