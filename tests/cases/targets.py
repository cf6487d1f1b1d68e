"""Small plans for targets that need not be here: what XLA makes of two layers shows what each costs."""

import dataclasses

import jax
import pytest

from duetto.model.config import ModelConfig
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, compile_stages
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.program_facts import ProgramFacts, join_facts, read_program_facts
from duetto.serve.planner.roofline.targets import MissingCompiler, Target, find_target, local_target
from duetto.serve.runtime.compiled.lowering import StepArguments
from duetto.serve.runtime.compiled.shapes import Shape, Sizes

# Layers of a model are equal: two of them show what each costs. TPU programs compile slowly, so theirs have
# few words.
LAYERS, WORDS = 2, 2048
PERIODS = {"qwen3.5-4b": 4, "qwen3-next-80b": 4}  # layers of models that mix several kinds
SIZES = Sizes(max_model_len=4096, max_num_seqs=64, pages=(8192,), page_size=64)
CONTEXT = 1024  # tokens in the cache of each row of a decode
SMALL = ModelConfig.uniform(512, 256, 768, 2, 8, 4, 32, tied_embeddings=True)


def small_job(context: int) -> EnginePlan:
    """A plan for this machine whose programs are quickly compiled."""
    sizes = Sizes(max_model_len=256, max_num_seqs=8, pages=(32,), page_size=64)
    return EnginePlan("small", SMALL, "float32", EngineOptions(), local_target(), sizes, context)


def found_target(name: str) -> Target:
    try:
        return local_target() if name == "cpu" else find_target(name)
    except MissingCompiler as error:
        pytest.skip(str(error))


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step's programs, read as one."""

    programs: list[jax.stages.Compiled]

    def as_text(self) -> str:
        return "\n".join(program.as_text() or "" for program in self.programs)

    def operations(self, name: str) -> float:
        """Return XLA's own count of an operation, such as flops."""
        return sum((program.cost_analysis() or {})[name] for program in self.programs)

    def facts(self) -> ProgramFacts:
        return join_facts([read_program_facts(program) for program in self.programs])


def compile_for(plan: EnginePlan, shape: Shape, arguments: StepArguments) -> CompiledStep:
    """Compile a step ahead of time for the plan's target."""
    return CompiledStep([program for program, _ in compile_stages(plan, shape, arguments)[0]])


def job_for(target: Target, model: str = "0.6b", dtype: str = "bfloat16") -> EnginePlan:
    platform, config = target.devices[0].platform, PRESETS[model]
    words = config.vocab_size if platform == "gpu" else WORDS
    layers = config.layers[: PERIODS.get(model, LAYERS)]
    config = dataclasses.replace(config, layers=layers, vocab_size=words)
    sizes = dataclasses.replace(SIZES, pages=SIZES.pages * len(config.windows))
    return EnginePlan("test", config, dtype, EngineOptions(), target, sizes, CONTEXT)
