"""Texts: classification with class token and word tokens, language models, sequences to sequences.

Classification: SoT (Xie et al. 2021, arXiv 2104.10935), table S-4, which gives sets where settings differ by task; each
recipe has one of them and names the others in `stated_in`. NOLA: Koohpayegani et al. 2023, arXiv 2310.02556; LoRA: Hu
et al. 2021, arXiv 2106.09685; QLoRA: Dettmers et al. 2023, arXiv 2305.14314; ResMLP for sequences: Touvron et al. 2021,
arXiv 2105.03404, machine translation, on a task made up for it.
"""

from vitrail.recipes.row import Recipe

WARMUP = 500 * 8 / 42_200  # epochs of LoRA's 500 steps on the training texts of E2E
TABLE_S4 = {
    "model.head": {"heads": 1, "rows": 64, "columns": 64, "drop": 0.5},
    "optim.epochs": 10,
    "optim.schedule": "linear",
    "optim.floor": 0.0,
}
GPT2 = {
    "data.batch": 8,
    "model": {"adapter.targets": ("qv",), "head": {"beams": 10, "no_repeat": 4, "longest": 64}, "trunk.length": 512},
    "objective.smoothing": 0.1,
    "optim.epochs": 5,
    "optim.schedule": "linear",
    "optim.clip": 0.0,
}
LLAMA2 = {
    "data.batch": 256,
    "model.adapter.targets": ("attention", "mlp"),
    "optim": {"epochs": 1, "schedule": "constant", "clip": 0.3},
}

TEXT = {
    "text": Recipe(
        "BERT and similar encoders: class token and second-order pooling of word tokens, fine-tuned as a whole.",
        source="table S-4. Warm-up is not given: one epoch of ten. The papers train on all of train and report dev, "
        "so no val is held out; to choose settings: --data.val_fraction 0.1 --data.judge val",
        command="--data glue/CoLA --model.name text:FOLDER --model.weights hub",
        expect="the paper, BERT-base on CoLA / RTE: 58.0 / 69.3 (Matthews x 100, %); not run here",
        stated_in="SoT, table S-4, BERT: batch 24, 64 or 96, learning rate 2e-5 or 3e-5, 1K to 5K features, dropout "
        "0.5 or 0.8",
        stated={
            **TABLE_S4,
            "data.batch": 64,
            "optim": {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 2e-5, "weight_decay": 0.0},
        },
        settings={
            "data": {"val_fraction": 0.0, "augment": {"crop": "evaluation", "flip": 0.0}},
            "model": {"name": "text:bert", "head.kind": "second_order"},
            "optim": {"warmup": 1, "warmup_lr": 0.0},
            "engine.checkpoint_every": 5,
        },
    ),
    "text-gpt": Recipe(
        "GPT: the class token is the last one, and there are no segments.",
        base="text",
        source="table S-4; warm-up as for BERT",
        command="--data glue/RTE --model.name text:FOLDER --model.weights hub",
        expect="not run here",
        stated_in="SoT, table S-4, GPT: batch 32 or 64, 10 or 15 epochs, 4K or 6K features, dropout 0.5 or 0.7",
        stated={
            **TABLE_S4,
            "data.batch": 32,
            "optim": {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 6.25e-5, "weight_decay": 0.01},
        },
        settings={"model.name": "text:gpt"},
    ),
    "text-spanbert": Recipe(
        "SpanBERT: as BERT, with decay and a larger epsilon.",
        base="text",
        source="table S-4; warm-up as for BERT",
        command="--data glue/RTE --model.name text:FOLDER --model.weights hub",
        expect="the paper, SpanBERT-base on CoLA / RTE: 63.77 / 77.26 (Matthews x 100, %); not run here",
        stated_in="SoT, table S-4, SpanBERT: 10 or 30 epochs, 1K, 4K or 5K features, dropout 0.5 or 0.7",
        stated={
            **TABLE_S4,
            "data.batch": 32,
            "optim": {"betas": (0.9, 0.999), "eps": 1e-6, "lr": 2e-5, "weight_decay": 0.01},
        },
    ),
    "text-roberta": Recipe(
        "RoBERTa: as BERT, with its own second moments and more decay.",
        base="text",
        source="table S-4; warm-up as for BERT",
        command="--data glue/RTE --model.name text:FOLDER --model.weights hub",
        expect="the paper, RoBERTa-base on CoLA / RTE: 65.28 / 80.50 (Matthews x 100, %); not run here",
        stated_in="SoT, table S-4, RoBERTa: batch 16 or 32, 10 or 20 epochs, learning rate 1e-5 or 2e-5, 1K, 4K or 5K "
        "features, dropout 0.5 or 0.7",
        stated={
            **TABLE_S4,
            "data.batch": 32,
            "optim": {"betas": (0.9, 0.98), "eps": 1e-6, "lr": 2e-5, "weight_decay": 0.1},
        },
    ),
    "small-text": Recipe(
        "A small encoder from scratch whose vocabulary is the words of the training texts.",
        command="--data synthetic:grammar?n=20000 [--model.name text:gpt]",
        settings={
            "data": {"uri": "synthetic:grammar?n=20000", "augment": {"crop": "evaluation", "flip": 0.0}},
            "model": {"name": "text:bert", "trunk": {"width": 128, "depth": 4, "heads": 4, "length": 64}},
            "model.head": {"kind": "second_order", "heads": 1, "rows": 32, "columns": 32, "drop": 0.1},
            "optim": {"epochs": 10, "warmup": 1, "weight_decay": 0.01},
            "engine": {"evaluate_every": 1, "checkpoint_every": 5},
        },
    ),
}

SEQUENCES = {
    "small-seq2seq": Recipe(
        "Numbers in words to digits, by an encoder and a decoder whose self-attention is a linear map over positions.",
        source="LayerScale 0.2, smoothing 0.1 and cross-attention are the paper's; AdamW and no dropout in place of "
        "its Adagrad and 0.15, for a model of two blocks and a run of minutes",
        command="[--model.name text:resmlp-attention]",
        expect="999 numbers of test, seeds 0 and 1: sequence accuracy 98.8 and 98.7 %, BLEU 99.2 and 99.4 % (0.18 M "
        "parameters); with self-attention 99.7 and 99.9 %, BLEU 99.8 and 100.0 % (0.24 M). A minute and a half of one "
        "core each (float32, PyTorch 2.15). Most errors are of a rare pattern: zeros that no word names. Learning "
        "rate and batch were chosen for maps, on val. In the paper maps are below attention on English to German "
        "(26.4 and 27.3 BLEU) and above it on English to French (40.3 and 38.1)",
        settings={
            "data": {"uri": "synthetic:numbers?n=20000", "batch": 64, "augment": {"crop": "evaluation", "flip": 0.0}},
            "model": {"name": "text:resmlp", "head": {"kind": "next_token", "longest": 12}},
            "model.trunk": {"width": 64, "depth": 2, "heads": 4, "length": 32, "drop": 0.0},
            "objective": {"kind": "language_model", "smoothing": 0.1},
            "optim": {"lr": 4e-3, "epochs": 3, "warmup": 0.3, "weight_decay": 0.01},
            "engine": {"evaluate_every": 1, "checkpoint_every": 0},
            "evaluators": ("perplexity",),
        },
    ),
}

LANGUAGE = {
    "nola-gpt2": Recipe(
        "GPT-2 M for table-to-text generation: a seed and 96,000 coefficients.",
        source="NOLA: k = l = 1000, 500 or 250, on queries and values or (`mlp`) on both layers of the MLP. Length "
        "penalty and warm-up (500 steps) as in LoRA's code, but no dropout on the adapter",
        command="--data e2e/ [--model.name text:gpt2-large]",
        expect="the paper, BLEU on E2E: 70.0 (M), 70.5 (L, 144,000 coefficients), with its own script; not run here",
        stated_in="NOLA (arXiv 2310.02556), the rest as in LoRA's released code for E2E",
        stated={
            **GPT2,
            "model.adapter": {"rank": 8, "coefficients": 1000, "scale": 1.0},
            "optim": {"lr": 0.1, "weight_decay": 0.0},
        },
        settings={
            "data.augment": {"crop": "evaluation", "flip": 0.0},
            "model": {"name": "text:gpt2-medium", "weights": "hub", "adapter": {"kind": "nola", "train_head": False}},
            "model.head": {"kind": "next_token", "length_penalty": 0.8},
            "objective.kind": "language_model",
            "optim": {"warmup": WARMUP, "warmup_lr": 0.0, "floor": 0.0},
            "engine": {"log_every": 100, "evaluate_every": 1, "checkpoint_every": 1},
            "evaluators": ("perplexity",),
        },
    ),
    "lora-gpt2": Recipe(
        "The same with LoRA.",
        base="nola-gpt2",
        source="LoRA's code, without its dropout on the adapter. r(m + n) gives 393,216 parameters; printed: 0.350 M",
        command="--data e2e/ [--model.adapter.rank 1]",
        expect="the paper, BLEU on E2E: 70.4 (M, rank 4), 68.7 (M, rank 1); not run here",
        stated_in="LoRA's released code for E2E: the baseline of NOLA (arXiv 2310.02556)",
        stated={**GPT2, "model.adapter": {"rank": 4, "scale": 32.0}, "optim": {"lr": 2e-4, "weight_decay": 0.01}},
        settings={"model.adapter.kind": "lora", "model.adapter.train_head": False},
    ),
    "nola-llama2": Recipe(
        "Instruction tuning of LLaMA-2: a seed and 57,344 coefficients (7B; 13B: 143,360, 70B: 573,440).",
        source="NOLA: k = l = 128, 256, 512 for 7B, 13B, 70B. Clipping and constant learning rate as in QLoRA's code; "
        "length not given: 512. The base has 8 bits there, float32 here (28 GB for 7B; 70B is too large for one "
        "accelerator)",
        command="--data alpaca_data.json [--model.name text:meta-llama/Llama-2-13b-hf]",
        expect="the paper, validation loss: 1.01 (7B), 0.97 (13B), 0.90 (70B); not run here",
        stated_in="NOLA (arXiv 2310.02556), the rest as in QLoRA's released code; its base has 8 bits",
        stated={**LLAMA2, "model.adapter": {"rank": 16, "coefficients": 128, "scale": 4.0}, "optim.lr": 1e-3},
        settings={
            "data": {"val_fraction": 0.02, "test_fraction": 0.02, "augment": {"crop": "evaluation", "flip": 0.0}},
            "model": {"name": "text:meta-llama/Llama-2-7b-hf", "weights": "hub", "trunk.length": 512},
            "model.head": {"kind": "next_token", "longest": 256, "judged": 0},
            "model.adapter": {"kind": "nola", "train_head": False},
            "objective.kind": "language_model",
            "optim": {"warmup": 0, "floor": 0.0, "weight_decay": 0.0},
            "engine": {"accumulate": 64, "log_every": 5, "evaluate_every": 0, "checkpoint_every": 0.25},
            "evaluators": ("perplexity",),
        },
        by_model={
            f"text:meta-llama/Llama-2-{size}-hf": {"model.adapter.coefficients": k}
            for size, k in (("13b", 256), ("70b", 512))
        },
    ),
    "lora-llama2": Recipe(
        "The same with LoRA of rank 1.",
        base="nola-llama2",
        source="NOLA: 2,498,560 parameters for 7B, 3,911,680 for 13B, 12,943,360 for 70B",
        command="--data alpaca_data.json",
        expect="the paper, validation loss: 1.04 (7B), 0.96 (13B), 0.92 (70B); not run here",
        stated_in="NOLA (arXiv 2310.02556): its LoRA baseline; its base has 8 bits",
        stated={**LLAMA2, "model.adapter.rank": 1, "model.adapter.scale": 16.0, "optim.lr": 2e-4},
        settings={"model.adapter.kind": "lora", "model.adapter.train_head": False},
    ),
    "small-gpt2": Recipe(
        "A small decoder from scratch for table-to-text generation; its vocabulary is the words of the training texts.",
        command="--data synthetic:meals?n=4000",
        expect="perplexity 1.15, BLEU 92.5 % on test (one seed); two minutes of one core. The lowest possible is "
        "about 1.03: of two right texts, either may be meant",
        settings={
            "data": {"uri": "synthetic:meals?n=4000", "batch": 64, "augment": {"crop": "evaluation", "flip": 0.0}},
            "model": {"name": "text:gpt", "head": {"kind": "next_token", "longest": 48}},
            "model.trunk": {"width": 128, "depth": 3, "heads": 4, "length": 128},
            "objective.kind": "language_model",
            "optim": {"lr": 2e-3, "epochs": 5, "warmup": 1, "weight_decay": 0.01},
            "engine": {"evaluate_every": 1, "checkpoint_every": 5},
            "evaluators": ("perplexity",),
        },
    ),
    "small-nola-gpt2": Recipe(
        "The small decoder for another style, as a seed and some thousand parameters.",
        base="small-gpt2",
        command="--model.weights RUN [--model.adapter.coefficients 1000]",
        expect="from small-gpt2, with 7,200 parameters: perplexity 1.58, BLEU 48.9 % on test (one seed; without the "
        "adapter 1,659 and 12.1 %); two minutes of one core",
        settings={
            "data.uri": "synthetic:meals?n=4000&style=curt",
            "model.adapter": {"kind": "nola", "coefficients": 200, "targets": ("attention", "mlp")},
            "optim": {"lr": 0.1, "weight_decay": 0.0},
        },
    ),
}
