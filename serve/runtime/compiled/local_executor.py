"""Execution of a table's programs by this process alone."""

from typing import Any

import numpy as np
from jaxtyping import Int

from ....kvcache.pages import Batch
from ....model.draft_pair import EngineParams, target_params
from ....model.embeddings.prompt import EmbeddingSpan
from ....model.transformer import logit_params
from ...host.process import clear_frames
from ..steps.output import NO_PROMPT_INPUTS, PromptInputs
from .batch_arrays import with_embedding_pool, with_packed_indices
from .encoder_input import pad_encoder_input
from .futures import PendingSample, apply_to_result
from .lowering import PromptKey, StepArguments, fresh_embeddings
from .program_table import ProgramTable
from .shapes import Shape


class LocalExecutor:
    """Executor that calls the programs of a table in the caller's thread. It implements `Executor`.

    programs: the table.
    assign_slot, load_history, load_masks: compiled programs that change slots.
    """

    def __init__(self, programs: ProgramTable):
        self.programs, small = programs, programs.small_programs
        self.assign_slot, self.load_history, self.load_masks = small[:3]

    @property
    def can_defer_sampling(self) -> bool:
        return self.programs.lowering.choose_sampler(Shape("decode", 1, 1)) is not None

    def run(
        self,
        shape: Shape,
        arguments: StepArguments,
        batch: Batch,
        prompt_inputs: PromptInputs = NO_PROMPT_INPUTS,
    ) -> tuple[Any, Any, Any]:
        """Dispatch a step, and the programs that score and pool its prompts; returns cache, slots and Output.
        The given cache and slots are donated."""
        programs, params = self.programs, arguments.params
        batch = with_packed_indices(batch, shape, programs.sizes)
        batch = with_embedding_pool(batch, arguments.embeddings)
        cache, slots, output = programs.steps[shape](params, arguments.cache, arguments.slots, batch)
        if shape.phase == "prefill":
            results = {
                name: programs.load_or_compile(PromptKey(name, shape.rows, shape.tokens))
                for name in prompt_inputs
            }
            params = logit_params(target_params(params))
            output = apply_to_result(
                lambda out: out.with_prompt_results(results, params, prompt_inputs), output
            )
        return cache, slots, output

    def run_forward(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, PendingSample]:
        """Dispatch the forward pass of a step; returns the cache and the pending draw. The given cache is
        donated."""
        step = self.programs.steps[shape]
        return step.run_forward(arguments.params, arguments.cache, arguments.slots, batch)

    def encode(self, arguments: StepArguments, span: EmbeddingSpan, rows: Int[np.ndarray, " count"]) -> Any:
        """Dispatch the encoding of a span into rows of the pool of embeddings; returns the pool. The given
        one is donated."""
        encoder, num_pool_rows = self.programs.config.target.encoder, self.programs.sizes.embedding_rows
        assert encoder is not None
        key, *inputs = pad_encoder_input(encoder, span.encoder_input, rows, num_pool_rows)
        params = target_params(arguments.params).encoder
        return self.programs.load_or_compile(key)(params, arguments.embeddings, *inputs)

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        """Return the parameters with an unused cache, unused slots and an unused pool of embeddings. They are
        made after the arrays of a step that raised `failure` are released."""
        clear_frames(failure)
        small, embeddings = self.programs.small_programs, fresh_embeddings(self.programs.abstract_arguments)
        return StepArguments(params, small.fresh_cache(), small.fresh_slots(), embeddings)

    def report(self) -> dict[str, Any]:
        return self.programs.report()

    def close(self) -> None:
        """Do nothing: the programs have no threads."""
