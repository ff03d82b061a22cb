"""Language models: NOLA and LoRA on GPT-2 and LLaMA-2, and small ones from scratch.

NOLA: Koohpayegani et al. 2023, arXiv 2310.02556; LoRA: Hu et al. 2021, arXiv 2106.09685; QLoRA: Dettmers et al. 2023,
arXiv 2305.14314.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from vitrail.learn.config import LanguageModelConfig
from vitrail.model.adapters.config import Lora, Nola
from vitrail.model.heads.config import NextToken

GPT2 = {
    "data.batch": 8,
    "optim.epochs": 5,
    "optim.schedule": "linear",
    "optim.clip": 0,
    "model.trunk.length": 512,
    "model.adapter.targets": ["qv"],
    "objective.smoothing": 0.1,
    "model.head.beams": 10,
    "model.head.no_repeat": 4,
    "model.head.longest": 64,
}
LLAMA2 = {
    "data.batch": 256,
    "optim.epochs": 1,
    "optim.schedule": "constant",
    "optim.clip": 0.3,
    "model.adapter.targets": ["attention", "mlp"],
}
STATED = {
    "nola-gpt2": {
        "source": "NOLA (arXiv 2310.02556), the rest as in LoRA's released code for E2E",
        **GPT2,
        "model.adapter.rank": 8,
        "model.adapter.coefficients": 1000,
        "model.adapter.scale": 1,
        "optim.lr": 0.1,
        "optim.weight_decay": 0,
    },
    "lora-gpt2": {
        "source": "LoRA's released code for E2E: the baseline of NOLA (arXiv 2310.02556)",
        **GPT2,
        "model.adapter.rank": 4,
        "model.adapter.scale": 32,
        "optim.lr": 0.0002,
        "optim.weight_decay": 0.01,
    },
    "nola-llama2": {
        "source": "NOLA (arXiv 2310.02556), the rest as in QLoRA's released code; its base has 8 bits",
        **LLAMA2,
        "model.adapter.rank": 16,
        "model.adapter.coefficients": 128,
        "model.adapter.scale": 4,
        "optim.lr": 0.001,
    },
    "lora-llama2": {
        "source": "NOLA (arXiv 2310.02556): the baseline beside it; its base has 8 bits",
        **LLAMA2,
        "model.adapter.rank": 1,
        "model.adapter.scale": 16,
        "optim.lr": 0.0002,
    },
}
BY_MODEL = {
    "nola-llama2": {
        "text:meta-llama/Llama-2-13b-hf": {"model.adapter.coefficients": 256},
        "text:meta-llama/Llama-2-70b-hf": {"model.adapter.coefficients": 512},
    }
}
PLAIN = AugmentConfig(crop="evaluation", flip=0.0)
WARMUP = 500 * 8 / 42_200  # epochs of LoRA's 500 steps on the training texts of E2E
E2E = RunConfig(
    data=DataConfig(uri="", batch=8, augment=PLAIN),
    model=ModelConfig(
        name="text:gpt2-medium",
        weights="hub",
        head=NextToken(beams=10, length_penalty=0.8, no_repeat=4, longest=64),
        trunk={"length": 512},
    ),
    objective=LanguageModelConfig(smoothing=0.1),
    optim=OptimConfig(
        name="adamw", lr=0.1, epochs=5, warmup=WARMUP, warmup_lr=0.0, floor=0.0, schedule="linear", weight_decay=0.0
    ),
    engine=EngineConfig(evaluate_every=1, checkpoint_every=1, log_every=100),
    evaluators=("perplexity",),
)
ALPACA = RunConfig(
    data=DataConfig(uri="", batch=256, val_fraction=0.02, test_fraction=0.02, augment=PLAIN),
    model=ModelConfig(
        name="text:meta-llama/Llama-2-7b-hf",
        weights="hub",
        head=NextToken(longest=256, judged=0),
        trunk={"length": 512},
    ),
    objective=LanguageModelConfig(),
    optim=OptimConfig(
        name="adamw", lr=1e-3, epochs=1, warmup=0, floor=0.0, schedule="constant", weight_decay=0.0, clip=0.3
    ),
    engine=EngineConfig(accumulate=64, evaluate_every=0, checkpoint_every=0.25, log_every=5),
    evaluators=("perplexity",),
)


def nola_gpt2() -> RunConfig:
    """GPT-2 M for table-to-text generation: a seed and 96,000 coefficients.

    Source:    NOLA: k = l = 1000, 500 or 250, on queries and values or (`mlp`) on both layers of the MLP.
               Length penalty and warm-up (500 steps) as in LoRA's code, but no dropout on the adapter
    Command:   vitrail train nola-gpt2 --data e2e/ [--model.name text:gpt2-large]
    Expect:    the paper, BLEU on E2E: 70.0 (M), 70.5 (L, 144,000 coefficients), with its own script; not run here
    """
    adapter = Nola(rank=8, coefficients=1000, targets=("qv",), train_head=False)
    return replace(E2E, recipe="nola-gpt2", model=replace(E2E.model, adapter=adapter))


def lora_gpt2() -> RunConfig:
    """The same with LoRA.

    Source:    LoRA's code, without its dropout on the adapter. r(m + n) gives 393,216 numbers, 0.350 M are printed
    Command:   vitrail train lora-gpt2 --data e2e/ [--model.adapter.rank 1]
    Expect:    the paper, BLEU on E2E: 70.4 (M, rank 4), 68.7 (M, rank 1); not run here
    """
    return replace(
        E2E,
        recipe="lora-gpt2",
        model=replace(E2E.model, adapter=Lora(rank=4, scale=32.0, targets=("qv",), train_head=False)),
        optim=replace(E2E.optim, lr=2e-4, weight_decay=0.01),
    )


def nola_llama2() -> RunConfig:
    """Instruction tuning of LLaMA-2: a seed and 57,344 coefficients (7B; 13B: 143,360, 70B: 573,440).

    Source:    NOLA: k = l = 128, 256, 512 for 7B, 13B, 70B. Clipping and a constant learning rate as in QLoRA's code;
               length not given: 512. The base has 8 bits there and float32 here, 28 GB for 7B: 70B is too large
               for one accelerator
    Command:   vitrail train nola-llama2 --data alpaca_data.json [--model.name text:meta-llama/Llama-2-13b-hf]
    Expect:    the paper, validation loss: 1.01 (7B), 0.97 (13B), 0.90 (70B); not run here
    """
    adapter = Nola(rank=16, coefficients=128, scale=4.0, targets=("attention", "mlp"), train_head=False)
    return replace(ALPACA, recipe="nola-llama2", model=replace(ALPACA.model, adapter=adapter))


def lora_llama2() -> RunConfig:
    """The same with LoRA of rank 1.

    Source:    NOLA: 2,498,560 parameters for 7B, 3,911,680 for 13B, 12,943,360 for 70B
    Command:   vitrail train lora-llama2 --data alpaca_data.json
    Expect:    the paper, validation loss: 1.04 (7B), 0.96 (13B), 0.92 (70B); not run here
    """
    return replace(
        ALPACA,
        recipe="lora-llama2",
        model=replace(ALPACA.model, adapter=Lora(rank=1, scale=16.0, targets=("attention", "mlp"), train_head=False)),
        optim=replace(ALPACA.optim, lr=2e-4),
    )


def small_gpt2() -> RunConfig:
    """A small decoder from scratch that writes what a table says; its vocabulary is the words of the training texts.

    Command:   vitrail train small-gpt2 --data synthetic:meals?n=4000
    Expect:    perplexity 1.15, BLEU 92.5 % on test (one seed); two minutes of one core. The least that can be had is
               about 1.03: which of two right texts is meant, nobody can know
    """
    return RunConfig(
        recipe="small-gpt2",
        data=DataConfig(uri="synthetic:meals?n=4000", batch=64, augment=PLAIN),
        model=ModelConfig(
            name="text:gpt",
            head=NextToken(longest=48),
            trunk={"width": 128, "depth": 3, "heads": 4, "length": 128},
        ),
        objective=LanguageModelConfig(),
        optim=OptimConfig(lr=2e-3, epochs=5, warmup=1, weight_decay=0.01),
        engine=EngineConfig(evaluate_every=1, checkpoint_every=5),
        evaluators=("perplexity",),
    )


def small_nola_gpt2() -> RunConfig:
    """The small decoder for another way of speaking, as a seed and some thousand numbers.

    Command:   vitrail train small-nola-gpt2 --model.weights RUN [--model.adapter.coefficients 1000]
    Expect:    from small-gpt2, with 7,200 numbers: perplexity 1.58, BLEU 48.9 % on test (one seed; without the adapter
               1,659 and 12.1 %); two minutes of one core
    """
    base = small_gpt2()
    return replace(
        base,
        recipe="small-nola-gpt2",
        data=replace(base.data, uri="synthetic:meals?n=4000&style=curt"),
        model=replace(base.model, adapter=Nola(rank=8, coefficients=200, targets=("attention", "mlp"))),
        optim=replace(base.optim, lr=0.1, weight_decay=0.0),
    )
