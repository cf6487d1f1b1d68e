"""The likeliest continuations."""

from duetto import LLM
from duetto.sampling_params import BeamSearchParams

llm = LLM(
    model="checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64
)
params = BeamSearchParams(beam_width=3, max_tokens=5)
for result in llm.beam_search([{"prompt": "def add(a, b):"}, {"prompt": "import"}], params):
    scores = [sequence.cum_logprob for sequence in result.sequences]
    print(len(result.sequences), "beams, best first:", scores == sorted(scores, reverse=True))
    print(repr(result.sequences[0].text))
