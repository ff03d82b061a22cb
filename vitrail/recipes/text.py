"""Text classification with class and word tokens: SoT (Xie et al. 2021, arXiv 2104.10935), table S-4.

The table gives sets where settings differ by task; each recipe has one of them and names the others in `STATED`.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from vitrail.model.heads.config import SecondOrder

STATED = {
    "text": {
        "source": "SoT, table S-4, BERT: batch 24, 64 or 96, rate 2e-5 or 3e-5, 1K to 5K numbers, dropout 0.5 or 0.8",
        "data.batch": 64,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.epochs": 10,
        "optim.lr": 2e-5,
        "optim.schedule": "linear",
        "optim.floor": 0,
        "optim.weight_decay": 0,
        "model.head.heads": 1,
        "model.head.rows": 64,
        "model.head.columns": 64,
        "model.head.drop": 0.5,
    },
    "text-gpt": {
        "source": "SoT, table S-4, GPT: batch 32 or 64, 10 or 15 epochs, 4K or 6K numbers, dropout 0.5 or 0.7",
        "data.batch": 32,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-8,
        "optim.epochs": 10,
        "optim.lr": 6.25e-5,
        "optim.schedule": "linear",
        "optim.floor": 0,
        "optim.weight_decay": 0.01,
        "model.head.heads": 1,
        "model.head.rows": 64,
        "model.head.columns": 64,
        "model.head.drop": 0.5,
    },
    "text-spanbert": {
        "source": "SoT, table S-4, SpanBERT: 10 or 30 epochs, 1K, 4K or 5K features, dropout 0.5 or 0.7",
        "data.batch": 32,
        "optim.betas": [0.9, 0.999],
        "optim.eps": 1e-6,
        "optim.epochs": 10,
        "optim.lr": 2e-5,
        "optim.schedule": "linear",
        "optim.floor": 0,
        "optim.weight_decay": 0.01,
        "model.head.heads": 1,
        "model.head.rows": 64,
        "model.head.columns": 64,
        "model.head.drop": 0.5,
    },
    "text-roberta": {
        "source": "SoT, table S-4, RoBERTa: batch 16 or 32, 10 or 20 epochs, rate 1e-5 or 2e-5, 1K, 4K or 5K features, "
        "dropout 0.5 or 0.7",
        "data.batch": 32,
        "optim.betas": [0.9, 0.98],
        "optim.eps": 1e-6,
        "optim.epochs": 10,
        "optim.lr": 2e-5,
        "optim.schedule": "linear",
        "optim.floor": 0,
        "optim.weight_decay": 0.1,
        "model.head.heads": 1,
        "model.head.rows": 64,
        "model.head.columns": 64,
        "model.head.drop": 0.5,
    },
}
HEAD = SecondOrder(heads=1, rows=64, columns=64, drop=0.5)
PLAIN = AugmentConfig(crop="evaluation", flip=0.0)


def text() -> RunConfig:
    """BERT and its kin, class token and second-order pooling of words, fine-tuned as a whole.

    Source:    table S-4. Warm-up is not given: one epoch of ten. The papers train on all of train and report dev, so no
               val is carved off; to choose settings: --data.val_fraction 0.1 --data.judge val
    Command:   vitrail train text --data glue/CoLA --model.name text:FOLDER --model.weights hub
    Expect:    the paper, BERT-base on CoLA / RTE: 58.0 / 69.3 (Matthews x 100, %); not run here
    """
    return RunConfig(
        recipe="text",
        data=DataConfig(uri="", batch=64, val_fraction=0.0, augment=PLAIN),
        model=ModelConfig(name="text:bert", head=HEAD),
        optim=OptimConfig(
            name="adamw", lr=2e-5, epochs=10, warmup=1, warmup_lr=0.0, floor=0.0, schedule="linear", weight_decay=0.0
        ),
        engine=EngineConfig(checkpoint_every=5),
    )


def text_gpt() -> RunConfig:
    """GPT: the class token is the last one, and there are no segments.

    Source:    table S-4; warm-up as for BERT
    Command:   vitrail train text-gpt --data glue/RTE --model.name text:FOLDER --model.weights hub
    Expect:    not run here
    """
    base = text()
    return replace(
        base,
        recipe="text-gpt",
        data=replace(base.data, batch=32),
        model=ModelConfig(name="text:gpt", head=HEAD),
        optim=replace(base.optim, lr=6.25e-5, weight_decay=0.01),
    )


def text_spanbert() -> RunConfig:
    """SpanBERT: as BERT, with decay and a larger epsilon.

    Source:    table S-4; warm-up as for BERT
    Command:   vitrail train text-spanbert --data glue/RTE --model.name text:FOLDER --model.weights hub
    Expect:    the paper, SpanBERT-base on CoLA / RTE: 63.77 / 77.26 (Matthews x 100, %); not run here
    """
    base = text()
    return replace(
        base,
        recipe="text-spanbert",
        data=replace(base.data, batch=32),
        optim=replace(base.optim, eps=1e-6, weight_decay=0.01),
    )


def text_roberta() -> RunConfig:
    """RoBERTa: as BERT, with its own second moments and more decay.

    Source:    table S-4; warm-up as for BERT
    Command:   vitrail train text-roberta --data glue/RTE --model.name text:FOLDER --model.weights hub
    Expect:    the paper, RoBERTa-base on CoLA / RTE: 65.28 / 80.50 (Matthews x 100, %); not run here
    """
    base = text()
    return replace(
        base,
        recipe="text-roberta",
        data=replace(base.data, batch=32),
        optim=replace(base.optim, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1),
    )


def small_text() -> RunConfig:
    """A small encoder from scratch whose vocabulary is the words of the training texts.

    Command:   vitrail train small-text --data synthetic:grammar?n=20000 [--model.name text:gpt]
    Expect:    not measured yet
    """
    return RunConfig(
        recipe="small-text",
        data=DataConfig(uri="synthetic:grammar?n=20000", batch=128, augment=PLAIN),
        model=ModelConfig(
            name="text:bert",
            head=SecondOrder(heads=1, rows=32, columns=32, drop=0.1),
            trunk={"width": 128, "depth": 4, "heads": 4, "length": 64},
        ),
        optim=OptimConfig(lr=1e-3, epochs=10, warmup=1, weight_decay=0.01),
        engine=EngineConfig(evaluate_every=1, checkpoint_every=5),
    )
